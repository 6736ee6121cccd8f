"""Make the tables of docs/results.md, docs/reliability.md and README.md, and the plots in docs/images, from reports.

python -m benchmarks.results_page            # rewrites tables and plots
python -m benchmarks.results_page --tables   # only tables
"""

from __future__ import annotations

import argparse

import matplotlib

from benchmarks.results_page.plots import IMAGES, PLOTS
from benchmarks.results_page.tables import PAGES, filled


def main() -> None:
    """Write tables, then plots."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="tables alone")
    options = parser.parse_args()
    for page in PAGES:
        page.write_text(filled(page.read_text("utf-8")), encoding="utf-8")
    if options.tables:
        return
    matplotlib.rcParams.update({"svg.hashsalt": "outrider", "svg.fonttype": "none"})
    for name, plot in PLOTS.items():
        plot().savefig(IMAGES / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
