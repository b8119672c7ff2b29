"""What is known of each op: one row per op in a factor notation, and the strategies that follow from
it.
"""
