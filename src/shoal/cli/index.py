"""`shoal index FILES… --out FOLDER`: an index of texts for retrieval."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
The index is named in a configuration: model.retrieval.index. A file is one document, and so is each line of a .jsonl file; a model that
learns from one of these documents never finds its passages in it. The folder's manifest.json says what the index was made of.
"""


def run(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "shoal index",
        description="Make an index of texts, whose passages a model reads.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("files", metavar="FILES", nargs="+", help="text files (.txt, .jsonl, gzipped or not), or folders of them")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="where to: a new folder")
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
