"""One commit to one live version: claim, build, gates, seal, release. Or refuse it and say why.

A version is identified by its commit, so a publisher that was killed anywhere starts over
and neither makes a second version of a commit nor loses one:

    killed before the manifest    the number is left behind, the commit is built under another
    before the pointer moved      the version is found by its commit and made live
    before the history was told   the pointer holds the move; the next one records it first
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from ckpt import layout
from ckpt.catalog import Catalog, CommitInfo
from ckpt.errors import BadInputError, CorruptError, NotFoundError, SidestageError, StorageError
from ckpt.events import LogSink
from ckpt.pins import pinned
from ckpt.types import EventSink
from publisher.build import VersionBuilder
from publisher.examination import Examination
from publisher.gates import GateError, GateReport, check_commit, event_time_of
from publisher.lease import Lease
from publisher.metric import MetricCheck
from publisher.parity import ParityCheck
from publisher.pointer import Reason
from publisher.policy import Policy
from publisher.records import GateName, Move, Refusal, Source, VersionManifest, source_of
from publisher.replay import Replay


@dataclass(frozen=True)
class Outcome:
    """What publishing a commit came to.

    built: the version was made now, not found.
    live, canary: it is the live version, or the canary, now.
    """

    version: int
    source: Source
    built: bool
    live: bool
    canary: bool


class Publisher:
    """Publishes the commits of one root into one registry.

    Args:
        builder: writes the files; it knows the root and the registry.
        parity: runs the golden-parity gate.
        who: names this publisher in manifests and history.
        policy: thresholds, and how versions are released.
        metric: measures versions, for a policy with a metric.
        lease: held by whoever calls; None: the caller answers for being the only publisher.
        sink: told what happens.
    """

    def __init__(  # noqa: PLR0913 - the injected parts are keyword-only and have defaults
        self,
        builder: VersionBuilder,
        parity: ParityCheck,
        who: str,
        *,
        policy: Policy | None = None,
        metric: MetricCheck | None = None,
        lease: Lease | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self.registry = builder.registry
        self.policy = policy or Policy()
        self.lease = lease
        self.catalog = Catalog(builder.root)
        self._builder = builder
        self._root = builder.root
        self._who = who
        self._clock = builder.registry.clock
        self._sink = sink or LogSink()
        replay = None
        if self.policy.metric is not None:
            if metric is None:
                raise BadInputError(
                    "the policy has a metric, and nothing that measures it was given"
                )
            replay = Replay(self.policy.metric, builder.root, metric)
        self._examination = Examination(self.policy.gates, parity, replay)

    def root_state(self) -> tuple[object, ...]:
        """Changes when a commit or an attempt comes or goes; costs two listings."""
        found = [o for p in (layout.ATTEMPTS, layout.COMMITS) for o in self._root.list(p)]
        return tuple((o.key, o.etag) for o in found)

    def candidates(self, commits: list[CommitInfo]) -> list[CommitInfo]:
        """Commits of the lineage that would go live by themselves, newest first."""
        live = self.registry.live()
        found = []
        for info in commits:
            # A corrupt one with a record is tried, so that the digests gate puts it on record.
            if info.status == "abandoned" or info.record is None:
                continue
            source = source_of(info.record, info.ref)
            if self.registry.is_newer(source, live):
                found.append((source.order, info))
        return [info for _, info in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def given_up(self, source: Source) -> Refusal | None:
        """The last refusal of a commit that was refused as often as the policy allows."""
        refusals = self.registry.refusals(source)
        return refusals[-1] if len(refusals) >= self.policy.release.max_attempts else None

    def publish_latest(self, why: str, *, retry: bool = False) -> Outcome:
        """Publish the newest commit unless that is done. `retry`: also if it was given up.

        Raises NotFoundError if there is no commit, GateError if it is, or was, refused.
        """
        info = self.catalog.latest()
        if info is None or info.record is None:
            raise NotFoundError(f"{self._root.url}: no committed checkpoint here yet")
        source = source_of(info.record, info.ref)
        for newer in self.catalog.commits():
            if newer.status == "corrupt" and (newer.ref.epoch, newer.ref.step) > source.order:
                self._sink.emit("commit_corrupt", step=newer.ref.step, reason=newer.problem)
        last = None if retry else self.given_up(source)
        if last is not None and self.registry.find(source, whole=True) is None:
            raise GateError(
                last.gate,
                f"step {source.step} was refused {last.attempt} times and given up (--retry tries "
                f"again): {last.reason}",
            )
        return self.publish(info, why)

    def publish(self, info: CommitInfo, why: str) -> Outcome:
        """Publish one commit; it is released unless its like or a newer one was before.

        Raises GateError after recording the refusal, LeaseLostError if another publisher has taken
        over, StorageError: try again.
        """
        assert info.record is not None
        source = source_of(info.record, info.ref)
        lease_epoch = self._lease_epoch()
        manifest = self.registry.find(source, whole=True)
        built = manifest is None
        if manifest is None:
            self._note_damage(source, lease_epoch)
            manifest = self._make(source, lease_epoch)
        move = self.registry.release(
            manifest,
            Reason(self._who, why),
            canary=self.policy.release.canary,
            lease_epoch=lease_epoch,
        )
        if move is not None:
            self._tell_released(move, manifest)
        now = move or self.registry.live()
        return Outcome(
            manifest.version,
            source,
            built,
            live=now is not None and now.to_version == manifest.version,
            canary=now is not None and now.canary == manifest.version,
        )

    def prune(self) -> list[int]:
        """Delete the versions that the policy doesn't keep."""
        deleted = self.registry.prune(self.policy.retention.keep)
        if deleted:
            self._sink.emit("versions_deleted", versions=deleted, keep=self.policy.retention.keep)
        return deleted

    def _lease_epoch(self) -> int:
        if self.lease is None:
            return self.registry.lease_epoch()
        self.lease.check()
        return self.lease.epoch

    def _tell_released(self, move: Move, manifest: VersionManifest) -> None:
        """Freshness so far: a host must still load the version."""
        now_s, event_s = self._clock.time(), manifest.event_time_s
        self._sink.emit(
            "version_canary" if move.kind == "canary" else "version_live",
            version=manifest.version,
            step=manifest.source.step,
            commit_to_live_s=round(now_s - manifest.committed_at_s, 3),
            event_to_live_s=None if event_s is None else round(now_s - event_s, 3),
        )

    def _note_damage(self, source: Source, lease_epoch: int) -> None:
        """Before a commit is built again because its version was damaged: each such version is a refusal.

        So a store that damages all that is written isn't filled for ever: GateError once the commit
        was refused as often as the policy allows.
        """
        damaged = self.registry.damaged(source)
        noted = {r.version for r in self.registry.refusals(source)} if damaged else set()
        for number in sorted(damaged.keys() - noted):
            self.registry.check_lease(lease_epoch)
            error = GateError("digests", damaged[number], CorruptError.exit_code)
            self._refuse(source, GateReport(), number, error)
            if self.given_up(source):
                raise error

    def _make(self, source: Source, lease_epoch: int) -> VersionManifest:
        started = self._clock.monotonic()
        draft = self._build(source, lease_epoch)
        # A publisher without a lease may have been faster.
        other = self.registry.find(source, whole=True)
        if other is not None:
            self.registry.discard(draft.version)
            return other
        manifest = replace(draft, published_at_s=self._clock.time())
        with self._refusing(source, GateReport(), draft.version, lease_epoch):
            try:
                self.registry.seal(manifest)
            except CorruptError as e:
                raise GateError("digests", str(e), e.exit_code) from e
        self._sink.emit(
            "version_published",
            version=manifest.version,
            step=source.step,
            seconds=round(self._clock.monotonic() - started, 3),
        )
        return manifest

    def _build(self, source: Source, lease_epoch: int) -> VersionManifest:
        """All files of a version, through all gates. Retention leaves the commit alone meanwhile."""

        def refused(why: str) -> None:
            self._sink.emit("not_pinned", step=source.step, reason=why)

        with pinned(self._root, source.ref, f"publisher {self._who}", refused=refused):
            return self._build_pinned(source, lease_epoch)

    def _build_pinned(self, source: Source, lease_epoch: int) -> VersionManifest:
        report = GateReport()
        started_at_s = self._clock.time()
        live = self.registry.live()
        # What the policy names must be there before an hour is spent on a build.
        batch = self._examination.batch()
        with self._refusing(source, report, None, lease_epoch):
            with report.guard("digests"):
                record = check_commit(self.catalog, self._root, source.ref)
                event_time_s = event_time_of(record)
            number = self.registry.claim(source, self._who, lease_epoch)
        with self._refusing(source, report, number, lease_epoch):
            built = self._builder.build(number, record, report)
            report.passed("digests", f"commit record, {len(record.files)} files, every chunk read")
            draft = VersionManifest(
                version=number,
                parent=live.to_version if live else None,
                source=source,
                dense_step=source.step,
                table_step=source.step,
                id_map_step=source.step,
                saved_at_s=record.saved_at_s,
                committed_at_s=record.committed_at_s,
                event_time_s=event_time_s,
                model=built.model,
                description_id=built.description_id,
                files=built.files,
                tables=built.tables,
                gates=tuple(report.results),
                published_by=self._who,
                lease_epoch=lease_epoch,
                started_at_s=started_at_s,
                published_at_s=started_at_s,
            )
            self._examination.decide(report, self.registry, draft, batch)
        return replace(draft, gates=tuple(report.results))

    @contextmanager
    def _refusing(
        self, source: Source, report: GateReport, number: int | None, lease_epoch: int
    ) -> Iterator[None]:
        """Record what a gate refuses, so that the commit isn't tried for ever; drop its files."""
        try:
            try:
                yield
            except SidestageError:
                raise
            except Exception as e:  # one commit must not end the daemon
                told = f"{type(e).__name__}: {e}"
                if _of_the_host(e):
                    raise StorageError(f"{told}; this host's trouble, not the commit's") from e
                raise GateError("build", told, SidestageError.exit_code) from e
        except GateError as e:
            self._discard(number)
            # Whoever has taken over since may have deleted what was missed here.
            self.registry.check_lease(lease_epoch)
            self._refuse(source, report, number, e)
            raise
        except SidestageError:
            self._discard(number)
            raise

    def _refuse(
        self, source: Source, report: GateReport, number: int | None, error: GateError
    ) -> None:
        gate: GateName = error.gate
        refusal = self.registry.refuse(
            Refusal(
                source=source,
                attempt=0,
                gate=gate,
                reason=error.reason,
                gates=tuple(report.results),
                version=number,
                who=self._who,
                at_s=self._clock.time(),
            )
        )
        self._sink.emit(
            "commit_refused",
            step=source.step,
            epoch=source.epoch,
            gate=gate,
            attempt=refusal.attempt,
            max_attempts=self.policy.release.max_attempts,
            reason=error.reason,
        )

    def _discard(self, number: int | None) -> None:
        if number is not None:
            with suppress(SidestageError):  # the reason is worth more than the space
                self.registry.discard(number)


def _of_the_host(error: Exception) -> bool:
    """Did memory, disk or network of this host fail? Says nothing about the commit: try again."""
    if isinstance(error, RuntimeError):  # torch's way of raising MemoryError
        return "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError | OSError)
