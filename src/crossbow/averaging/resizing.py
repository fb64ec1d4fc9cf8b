"""Resizing: a fleet goes on with another number of learners.

All learners, old and new, begin where the central model stands. What an old one has to itself, the
state of its optimizer and its random stream, goes with it, to another rank if that runs it from now
on. A new one begins with an optimizer at rest and a stream of its own.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch.optim import Optimizer

from crossbow.comm.world import World
from crossbow.data.order import hash64
from crossbow.engines.sequential import Own

_NEWCOMERS = 4  # the hash stream of random streams; 1 and 2 are data/order.py's, 3 is adoption.py's


def at_rest(seed: int, learner: int, samples: int) -> Own:
    """What a learner has that joins after so many samples."""
    own_seed = int(hash64(np.array([learner]), seed, _NEWCOMERS, samples)[0]) % 2**63
    return Own(defaultdict(dict), torch.Generator().manual_seed(own_seed).get_state())


def reassign(
    owns: Mapping[int, Own], optimizer: Optimizer, shares: Sequence[range], world: World
) -> dict[int, Own]:
    """Return what this rank's old learners have, by learner; all ranks call this together.

    Args:
        owns: of the learners that this rank ran so far.
        optimizer: by whose parameters states are kept.
        shares: the learners of every rank from now on.
        world: this rank's place.
    """
    mine = shares[world.rank]
    places = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {p: number for number, p in enumerate(places)}
    leaving = {
        learner: Own({numbers.get(p, p): state for p, state in own[0].items()}, own[1])
        for learner, own in owns.items()
        if learner not in mine and learner < shares[-1].stop
    }
    found = {learner: own for learner, own in owns.items() if learner in mine}
    for said in world.gather(leaving):
        for learner, (states, random_state) in said.items():
            if learner in mine:
                named = {
                    places[key] if isinstance(key, int) else key: state
                    for key, state in states.items()
                }
                found[learner] = Own(defaultdict(dict, named), random_state)
    return found
