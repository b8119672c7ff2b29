"""What a plan costs: clusters, times of ops and collectives, memory, simulated schedules. Numbers in, numbers out."""
