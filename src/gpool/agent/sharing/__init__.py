"""GPU sharing with enforced limits. The scheduler has decided which task gets which slice.

| mode | neighbours | memory | compute |
|---|---|---|---|
| `exclusive` | none | the card | the card |
| `mig` | anybody: separated by hardware | the instance | the instance |
| `mps` | one user's tasks | limited by the driver; a watchdog ends evaders | a share of the processors |
| `timeslice` | one user's tasks | a watchdog ends tasks over their slice | time slices |

A **tenancy** is one user's time on a GPU or on one MIG instance; the next begins after the memory is clean.
"""
