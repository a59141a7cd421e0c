"""One commit to one live version: claim, build, gates, seal, promote. Or refuse it and say why.

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
from ckpt.errors import NotFoundError, SidestageError
from ckpt.events import LogSink
from ckpt.pins import pinned
from ckpt.types import EventSink
from publisher.build import VersionBuilder
from publisher.gates import GateError, GateReport, check_commit
from publisher.parity import ParityCheck, parity_verdict
from publisher.pointer import Reason
from publisher.records import GateName, Refusal, Source, VersionManifest, source_of


@dataclass(frozen=True)
class PublishPolicy:
    """What a version must reach, and how often a refused commit is tried.

    parity_max_abs_err: the golden request's answers must be closer to fp32 than this.
    max_attempts: refusals after which a commit is given up.
    """

    parity_max_abs_err: float = 0.01
    max_attempts: int = 3


@dataclass(frozen=True)
class Outcome:
    """What publishing a commit came to.

    built: the version was made now, not found.
    live: it is the live version now.
    """

    version: int
    source: Source
    built: bool
    live: bool


class Publisher:
    """Publishes the commits of one root into one registry.

    Args:
        builder: writes the files; it knows the root and the registry.
        parity: runs the golden-parity gate.
        who: names this publisher in manifests and history.
        policy: thresholds.
        sink: told what happens.
    """

    def __init__(
        self,
        builder: VersionBuilder,
        parity: ParityCheck,
        who: str,
        *,
        policy: PublishPolicy | None = None,
        sink: EventSink | None = None,
    ) -> None:
        self.registry = builder.registry
        self.policy = policy or PublishPolicy()
        self.catalog = Catalog(builder.root)
        self._builder = builder
        self._root = builder.root
        self._parity = parity
        self._who = who
        self._clock = builder.registry.clock
        self._sink = sink or LogSink()

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
        return refusals[-1] if len(refusals) >= self.policy.max_attempts else None

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
        if last is not None and self.registry.find(source) is None:
            raise GateError(
                last.gate,
                f"step {source.step} was refused {last.attempt} times and given up (--retry tries "
                f"again): {last.reason}",
            )
        return self.publish(info, why)

    def publish(self, info: CommitInfo, why: str) -> Outcome:
        """Publish one commit; it goes live unless its like or a newer one was live before.

        Raises GateError after recording the refusal, StorageError: try again.
        """
        assert info.record is not None
        source = source_of(info.record, info.ref)
        manifest = self.registry.find(source)
        built = manifest is None
        if manifest is None:
            manifest = self._make(source)
        else:
            self.registry.check_files(manifest)
        move = self.registry.promote(manifest, Reason(self._who, why))
        if move is not None:
            self._sink.emit("version_live", version=manifest.version, step=source.step)
        live = move or self.registry.live()
        is_live = live is not None and live.to_version == manifest.version
        return Outcome(manifest.version, source, built, is_live)

    def _make(self, source: Source) -> VersionManifest:
        started = self._clock.monotonic()
        draft = self._build(source)
        # Another publisher may have been faster; the lease that excludes it isn't ours yet.
        other = self.registry.find(source)
        if other is not None:
            self.registry.discard(draft.version)
            return other
        manifest = replace(draft, published_at_s=self._clock.time())
        self.registry.seal(manifest)
        self._sink.emit(
            "version_published",
            version=manifest.version,
            step=source.step,
            seconds=round(self._clock.monotonic() - started, 3),
        )
        return manifest

    def _build(self, source: Source) -> VersionManifest:
        """All files of a version, through all gates. Retention leaves the commit alone meanwhile."""

        def refused(why: str) -> None:
            self._sink.emit("not_pinned", step=source.step, reason=why)

        with pinned(self._root, source.ref, f"publisher {self._who}", refused=refused):
            return self._build_pinned(source)

    def _build_pinned(self, source: Source) -> VersionManifest:
        report = GateReport()
        started_at_s = self._clock.time()
        live = self.registry.live()
        with self._refusing(source, report, None):
            with report.guard("digests"):
                record = check_commit(self.catalog, self._root, source.ref)
            number = self.registry.claim(source, self._who)
        with self._refusing(source, report, number):
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
                event_time_s=None,
                model=built.model,
                description_id=built.description_id,
                files=built.files,
                tables=built.tables,
                gates=tuple(report.results),
                published_by=self._who,
                lease_epoch=0,
                started_at_s=started_at_s,
                published_at_s=started_at_s,
            )
            with report.guard("golden_parity"):
                err = self._parity(self.registry, draft)
                parity_verdict(report, err, self.policy.parity_max_abs_err)
        return replace(draft, gates=tuple(report.results))

    @contextmanager
    def _refusing(self, source: Source, report: GateReport, number: int | None) -> Iterator[None]:
        """Record what a gate refuses, so that the commit isn't tried for ever; drop its files."""
        try:
            yield
        except GateError as e:
            self._refuse(source, report, number, e)
            raise
        except SidestageError:
            self._discard(number)
            raise
        except Exception as e:  # one commit must not end the daemon
            error = GateError("build", f"{type(e).__name__}: {e}", SidestageError.exit_code)
            self._refuse(source, report, number, error)
            raise error from e

    def _refuse(
        self, source: Source, report: GateReport, number: int | None, error: GateError
    ) -> None:
        self._discard(number)
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
            max_attempts=self.policy.max_attempts,
            reason=error.reason,
        )

    def _discard(self, number: int | None) -> None:
        if number is not None:
            with suppress(SidestageError):  # the reason is worth more than the space
                self.registry.discard(number)
