"""A model of Redis: one server, as its clients see it, with a clock and a network that are given from outside.

It knows the commands that the package uses, and some that tests use; scripts are run by a real Lua 5.1. What it does
not know ends the simulation by `UnknownCommand`: an answer that is a guess would show nothing.

Where it differs from the real one, as far as is known (`tests/simulation/test_redis_model.py` compares them):

- SCAN, HSCAN and KEYS show the same names in another order; cursors are other numbers.
- What has ended is deleted when somebody looks at it, or by `sweep`; the real one does that whenever it likes (DBSIZE).
- `MAXLEN ~` trims nodes of 100 entries; those of the real one may be smaller, if the entries are large.
- cjson is stricter about numbers (`01`, `0x1`), and says otherwise what is wrong; a script that raises a table before
  version 7, or one without `err` since, is answered otherwise. There are no `bit`, `struct` and `cmsgpack`.
- A script sees what has ended on a replica of the real one, until its primary deletes that.
- Busy and loading servers, passwords, and WAIT with replicas are made after the documentation, and not compared.
"""

from tests.simulation.redis.cluster import ClusterMap, slot_of
from tests.simulation.redis.dataset import Change, Dataset
from tests.simulation.redis.replies import UnknownCommand
from tests.simulation.redis.server import RedisModel
from tests.simulation.redis.session import Session

__all__ = ["Change", "ClusterMap", "Dataset", "RedisModel", "Session", "UnknownCommand", "slot_of"]
