"""A model of Redis: one server as its clients see it, with a clock and a network given from outside.

It knows the commands that the package uses, but for those of the journal and of diagnosis; a real Lua 5.1 runs the
scripts. Unknown commands end the simulation with `UnknownCommand`: a guessed answer would prove nothing.

Known differences from a real server (`tests/simulation/test_redis_model.py` compares them):

- SCAN and HSCAN show the same names in another order; cursors are other numbers.
- Expired keys are deleted when somebody looks at them; a real server does that at any time.
- cjson is stricter about numbers (`01`, `0x1`), and words its errors differently; a script that raises a table (before
  version 7), or a table without `err` (since then), gets another answer. `bit`, `struct` and `cmsgpack` are missing.
"""

from tests.simulation.redis.cluster import ClusterMap, slot_of
from tests.simulation.redis.dataset import Change, Dataset
from tests.simulation.redis.replies import UnknownCommand
from tests.simulation.redis.server import RedisModel
from tests.simulation.redis.session import Session

__all__ = ["Change", "ClusterMap", "Dataset", "RedisModel", "Session", "UnknownCommand", "slot_of"]
