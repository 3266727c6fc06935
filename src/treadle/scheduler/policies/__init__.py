"""What a user or a third party can choose: which phases a step runs, and who goes first.

`protocols` says what a policy is, `registry` finds one by name; every other file is one policy.
"""
