"""Styles, scripts and pictures: collected once, compressed and named by their content, so that browsers keep them.

`weir up` and the image collect them; a gateway that finds nothing collected serves them as the packages hold them.
"""

from __future__ import annotations

import os
from typing import Any

from whitenoise.middleware import WhiteNoiseMiddleware
from whitenoise.storage import CompressedManifestStaticFilesStorage


class CollectedFiles(CompressedManifestStaticFilesStorage):  # type: ignore[misc]  # WhiteNoise has no types
    support_js_module_import_aggregation = True  # else a module would be loaded again under its plain name
    patterns = tuple(
        (
            glob,
            tuple(
                pattern
                for pattern in found
                # Third-party files come without the source maps that they name.
                if "sourceMappingURL" not in (pattern if isinstance(pattern, str) else pattern[0])
            ),
        )
        for glob, found in CompressedManifestStaticFilesStorage.patterns
    )

    def stored_name(self, name: str) -> str:
        """What is not collected keeps its plain name."""
        stored: str = super().stored_name(name) if self.hash_key(name) in self.hashed_files else name
        return stored


class StaticFilesMiddleware(WhiteNoiseMiddleware):  # type: ignore[misc]
    """What was collected, and from the packages what was not."""

    def add_files(self, root: Any, prefix: Any = None) -> None:
        if os.path.isdir(root):  # WhiteNoise warns of one that is not there
            super().add_files(root, prefix)

    def add_file_to_dictionary(self, url: str, path: str, stat_cache: Any = None) -> None:
        if url not in self.files:
            super().add_file_to_dictionary(url, path, stat_cache)
