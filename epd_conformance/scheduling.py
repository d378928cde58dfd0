"""How pytest-xdist hands cells to workers: one topology whole, to one worker. Imported only where pytest-xdist is in use."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from epd_conformance.catalogue.selection import cell_of_test, parse_cell_id


class TopologyScheduling(LoadScopeScheduling):  # type: ignore[misc]  # pytest-xdist says nothing about its types
    """The cells of a topology share its servers, so a worker gets all of them, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        cell = cell_of_test(nodeid)
        return parse_cell_id(cell)[1] if cell else ""

    def remove_node(self, node: WorkerController) -> str | None:
        """Take a worker out; what it had not begun goes to others. Returns the test that it died of, if it had one.

        The rest of the topology that it was at stays undone: its noise floor and its journals are those of servers that are
        gone, and another worker's would not belong to the cells that are recorded already.
        """
        units = self.assigned_work.pop(node)
        undone = [(scope, unit) for scope, unit in units.items() if not all(unit.values())]
        if not undone:
            return None
        _, broken = undone[0]
        self.workqueue.update(undone[1:])
        for other in self.assigned_work:
            self._reschedule(other)
        died_of: str = next(nodeid for nodeid, done in broken.items() if not done)
        return died_of
