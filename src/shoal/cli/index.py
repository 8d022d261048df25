"""`shoal index FILES… --out FOLDER`: builds an index of texts for retrieval."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
Name the index in a configuration as model.retrieval.index. Each file, or each line of a .jsonl file, is one document; a model that learns
from a document never finds passages of the same document. The folder's manifest.json lists the sources.
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal index",
        description="Build an index of texts, from which a model retrieves passages.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("files", metavar="FILES", nargs="+", help="text files (.txt, .jsonl, gzipped or not), or folders of them")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="the new folder")
    parser.add_argument(
        "--encoder", choices=("minilm", "words"), default="minilm", help="compare by meaning, or by words (minilm: needs shoal[rag])"
    )
    parser.add_argument("--passage-words", metavar="N", type=int, default=64, help="words of a passage (64)")
    arguments = parser.parse_args(argv)
    if arguments.passage_words < 1:
        parser.error("--passage-words: a passage has at least one word")

    from shoal.cli.output import download
    from shoal.data.retrieval.load_index import index_files

    index = index_files(
        arguments.files,
        Path(arguments.out),
        arguments.encoder,
        arguments.passage_words,
        lambda done, total: download(f"passages for {arguments.encoder}", done, total),
    )
    sys.stderr.flush()
    print(f"written: {arguments.out} ({len(index.passages.texts):,} passages of {len(index.passages.origins):,} documents)")
    return 0
