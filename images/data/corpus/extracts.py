"""A query's rows as one run sees them: who asks first leaves them in the run's folder, the others read those.

Machines that share a run out must see the same rows, whatever is written to the database meanwhile, and it need not be
asked by each of them. Once the run has its dataset the rows are taken away.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from refit import fingerprint
from refit.manifest import Manifest
from refit.spec import Pipeline, Source
from refit.store import Heard, join, store_for


@dataclass(frozen=True)
class Extracts:
    """The extracts of a run. `folder` is where they lie; None where one machine does all, and its own disk will do."""

    folder: str | None

    def of(self, source: Source, query: str, where: str, heard: Heard) -> tuple[str, str]:
        """Name and address of the file with a query's rows.

        Raises:
            BadInput: the connection is not known, or the database refuses the query.
            ServerUnavailable: the database does not answer.
        """
        from corpus import database  # most lines have no database, and need not load what speaks to one

        if self.folder is None:
            made = database.extract(source.uri, query, where, heard=heard)
            return database.FILE, made.path.absolute().as_uri()
        place = self._place(source)
        store = store_for(place)
        if store.manifest(place) is None:
            made = database.extract(source.uri, query, where, heard=heard)
            with store.publish(place) as draft:  # where two machines ask, what the first one got stands
                shutil.copyfile(made.path, draft.path / database.FILE)
                draft.commit(Manifest(kind="extract", fingerprint=made.digest))
        return database.FILE, join(place, database.FILE)

    def clear(self, spec: Pipeline) -> None:
        """Take them away."""
        for source in spec.data.sources:
            if self.folder is not None and source.query is not None:
                store_for(self.folder).remove(self._place(source))

    def _place(self, source: Source) -> str:
        assert self.folder is not None
        return join(self.folder, fingerprint.digest([source.uri, source.query])[:32])
