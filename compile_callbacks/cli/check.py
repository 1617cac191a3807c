"""``compile-callbacks check``: compares the report of a run with a contract, as a gate in continuous integration."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from compile_callbacks.report.contract import ContractError, compare, make_contract, read_contract, read_record
from compile_callbacks.report.file import FILE_NAME


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the subcommand."""
    parser.description = (
        "Compare a report with a contract. Exit status: 1 if it breaks the contract, 2 if it cannot be compared."
    )
    add = parser.add_argument
    add("report", type=Path, metavar="REPORT", help=f"a {FILE_NAME}, or the folder that contains it")
    add("--against", type=Path, required=True, metavar="CONTRACT", help="the JSON file with the contract")
    add("--write", action="store_true", help="write the contract that allows the figures of the report")
    add("--json", action="store_true", help="print the breaches as JSON")


def run(args: argparse.Namespace) -> int:
    """Compare, and return the exit status."""
    path = args.report / FILE_NAME if args.report.is_dir() else args.report
    try:
        if args.write:
            contract = make_contract(read_record(path))
            args.against.write_text(json.dumps(contract, indent=2) + "\n")
            return 0
        contract = read_contract(args.against)
        record = read_record(path, contract.get("call"))
        breaches, missing = compare(record, contract)
        torch = record["environment"].get("torch")
    except OSError as error:
        raise ContractError(f"{args.against} cannot be written: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ContractError(f"{path} or {args.against} is damaged: {type(error).__name__}: {error}") from error
    notes = []
    if contract.get("torch", torch) != torch:
        notes.append(f"the contract is for torch {contract['torch']}, and the report is of torch {torch}")
    if args.json:
        sys.stdout.write(json.dumps({"breaches": breaches, "missing": missing, "notes": notes}, indent=2) + "\n")
    else:
        for breach in breaches:
            rounded = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in breach.items()}
            sys.stdout.write("{phase}.{figure}: {value}, allowed {allowed}: {reason}\n".format(**rounded))
        sys.stderr.writelines(f"compile-callbacks check: {line}\n" for line in (*notes, *missing))
    return 1 if breaches else 2 if missing else 0
