"""What a start on one node rather than another costs a task in seconds: loading what is not there yet, and work lost with the node.

A node that goes away once in `mtbf` takes `run / mtbf` runs with it. Each loses, on average, half of what a checkpoint would
have kept (half the run, where there is none) and a restart. Of a gang every member's loss is the whole gang's.

Seconds count in steps of a part of the run: what is lost in a day's run by a minute of loading is not worth a GPU that is
spoilt for others. A run time nobody knows counts as ten minutes; known ones are rounded to powers of two, so that shapes with
about the same are scored together.
"""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.model import SECOND, Shape, Span

UNKNOWN_RUN = Span(600 * SECOND)
RESTART = 60  # seconds until a lost task runs again
MAKING = 60  # seconds until an environment that does not lie ready is made, roughly
LOAD_BYTES_PER_S = 100_000_000  # at which inputs come
STEPS = 200  # to a run


class Stakes(NamedTuple):
    """`exposure`: what is lost on a node by one run, times the time between its losses, in seconds. `loading`: seconds for the inputs. `grain`: seconds of one step."""

    exposure: int
    loading: int
    grain: int


def stakes(shape: Shape, predicted: Span | None) -> Stakes:
    run = _rounded(UNKNOWN_RUN if predicted is None else predicted)
    kept = run if shape.checkpoint_every is None else min(run, shape.checkpoint_every // SECOND)
    each = kept // 2 + RESTART
    exposure = run * each * shape.requirements.nodes
    return Stakes(exposure, shape.data_bytes // LOAD_BYTES_PER_S, max(1, run // STEPS))


def _rounded(run: Span) -> int:
    """To seconds that are a power of two."""
    seconds: int = max(1, run // SECOND)
    return 1 << (seconds - 1).bit_length()
