"""Serve a trained module as a `.pt2` package with a small HTTP server, and call the server with a client.

`export` writes a package with compiled code and weights. `load_exported` returns a callable that checks its inputs. The
server needs neither Lightning nor the module's source. The example trains and exports a module, starts the server,
sends a request and ends. With `--package`, it keeps the package for a separate server and client:

    python examples/serve.py --package digits.pt2
    python examples/serve.py --serve digits.pt2 --port 8080  # until interrupted; run the next line in another terminal
    python -c 'import json; print(json.dumps({"images": [[0.5] * 64]}))' | curl -d @- http://127.0.0.1:8080
"""

import argparse
import json
import tempfile
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from compile_callbacks import export, load_exported


def make_server(package: Path, port: int) -> ThreadingHTTPServer:
    """Create a server that answers POSTs of ``{"images": [[64 numbers], ...]}`` with ``{"digits": [...]}``."""
    model = load_exported(package)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                images = torch.tensor(body["images"], dtype=torch.float32)
                answer, status = {"digits": model(images).argmax(dim=1).tolist()}, 200
            except (ValueError, KeyError, TypeError) as error:  # for example, an input has a wrong shape
                answer, status = {"error": str(error)}, 400
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args):
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


def ask(address: str, images: list) -> dict:
    """Send images to the server, and return its answer."""
    request = urllib.request.Request(address, json.dumps({"images": images}).encode())
    try:
        with urllib.request.urlopen(request) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


def train_and_export(path: Path):
    """Train a module and export it to a package. Return the module and the validation digits."""
    from digits import DigitClassifier, digits, loaders, make_trainer

    model = DigitClassifier()
    make_trainer(max_epochs=4).fit(model, *loaders())
    export(model, (torch.zeros(8, 64),), path)
    return model, digits()[1].tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--package", type=Path, help="leave the package here (default: it goes with the program)")
    parser.add_argument("--serve", type=Path, help="serve this package until interrupted, and do nothing else")
    parser.add_argument("--port", type=int, default=8080)
    args = parser.parse_args()
    if args.serve:
        make_server(args.serve, args.port).serve_forever()

    from digits import check

    with tempfile.TemporaryDirectory() as folder:
        package = args.package or Path(folder, "digits.pt2")
        model, (images, labels) = train_and_export(package)
        print(f"{package.name}  {package.stat().st_size / 1e6:.1f} MB")
        server = make_server(package, port=0)  # 0 selects a free port
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        served = torch.tensor(ask(address, images.tolist())["digits"])
        wrong = ask(address, [[1.0, 2.0]])
        server.shutdown()
        server.server_close()

    with torch.no_grad():
        eager = model.eval()(images).argmax(dim=1)
    print(f"asked for {len(images)} digits; the first ones are {served[:8].tolist()}; two numbers: {wrong['error']}")
    check(torch.equal(served, eager), "the server's answer equals the eager module's")
    check((served == labels).float().mean().item() > 0.85, "it reads digits")
    check("error" in wrong, "an input of another shape is refused")


if __name__ == "__main__":
    main()
