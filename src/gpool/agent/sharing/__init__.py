"""How tasks share GPUs on this machine, with limits that hold. Who gets which slice was decided by the scheduler.

| mode | who may be neighbours | memory | compute |
|---|---|---|---|
| `exclusive` | nobody | the card | the card |
| `mig` | anybody: the hardware keeps them apart | the instance | the instance |
| `mps` | one user's tasks | the driver refuses more, the watchdog ends who got around it | a share of the processors |
| `timeslice` | one user's tasks | the watchdog ends the one over its slice | by turns |

A **tenancy** is one user's time on a GPU, or on one MIG instance of it. When it ends, what the user left is overwritten
and checked, and the card is set back as it was; only then the next one begins.
"""
