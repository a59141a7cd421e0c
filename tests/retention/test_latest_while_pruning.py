"""Looking for the latest while retention deletes what was listed."""

from __future__ import annotations

from ckpt import layout
from ckpt.catalog import Catalog
from ckpt.storage import MemoryStorage
from tests.faults import FaultyStorage
from tests.retention.test_prune import LAST, Run, prune


class PrunesBehind(FaultyStorage):
    """A store on which, after the first listing of commits, a newer one comes and the others go."""

    run: Run | None = None

    def list(self, prefix: str = "") -> object:  # type: ignore[override]
        found = list(super().list(prefix))
        if prefix == layout.COMMITS and self.run is not None:
            run, self.run = self.run, None
            run.commit(1, 9)
            assert len(prune(self.inner, LAST).deleted) == 2
        return iter(found)


def test_the_latest_is_found_though_all_that_was_listed_is_gone() -> None:
    storage = PrunesBehind(MemoryStorage())
    storage.run = Run(storage.inner, 1, 2)
    latest = Catalog(storage).latest()  # type: ignore[arg-type]
    assert latest is not None
    assert latest.ref.step == 9
