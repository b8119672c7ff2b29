"""Models mutated at random: real-looking models whose sizes, ops and wiring are drawn from a seed.

    seed ──Draw──► base model (bases, library) with odd sizes
                   of blocks (attention, channels, scans), ops put between them (ops), wiring around them (wiring)
                   and a loss (losses) ──trains by itself?──► Mutated, checked as every model of the sweep

Each must train in parallel as on one process, or be refused by an error that says what, where and what would mend it.
"""
