"""Compare the report of a run with a contract, as a gate in continuous integration.

The exit status is 1 if the report breaks the contract, and 2 if it cannot be compared.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from compile_callbacks.report.contract import ContractError, compare, make_contract, read_contract, read_record
from compile_callbacks.report.file import FILE_NAME

ARGUMENTS: dict[str, dict[str, Any]] = {
    "report": {"type": Path, "metavar": "REPORT", "help": f"a {FILE_NAME}, or the folder that contains it"},
    "--against": {"type": Path, "required": True, "metavar": "CONTRACT", "help": "the JSON file with the contract"},
    "--write": {"action": "store_true", "help": "write the contract that allows the figures of the report"},
    "--json": {"action": "store_true", "dest": "as_json", "help": "print the breaches as JSON"},
}


def run(report: Path, against: Path, write: bool, as_json: bool) -> int:
    """Compare, and return the exit status."""
    path = report / FILE_NAME if report.is_dir() else report
    try:
        if write:
            against.write_text(json.dumps(make_contract(read_record(path)), indent=2) + "\n")
            return 0
        contract = read_contract(against)
        record = read_record(path, contract.get("call"))
        breaches, missing = compare(record, contract)
        torch = record["environment"].get("torch")
    except OSError as error:
        raise ContractError(f"{against} cannot be written: {error}") from error
    except (LookupError, TypeError, AttributeError) as error:
        raise ContractError(f"{path} or {against} is damaged: {type(error).__name__}: {error}") from error
    note = f"the contract is for torch {contract.get('torch')}, and the report is of torch {torch}"
    notes = [note] if contract.get("torch", torch) != torch else []
    if as_json:
        sys.stdout.write(json.dumps({"breaches": breaches, "missing": missing, "notes": notes}, indent=2) + "\n")
    else:
        for breach in breaches:
            rounded = {name: f"{x:.4g}" if isinstance(x, float) else x for name, x in breach.items()}
            sys.stdout.write("{phase}.{figure}: {value}, allowed {allowed}: {reason}\n".format(**rounded))
        sys.stderr.writelines(f"compile-callbacks check: {line}\n" for line in (*notes, *missing))
    return 1 if breaches else 2 if missing else 0
