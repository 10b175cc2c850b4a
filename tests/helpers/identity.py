"""An identity provider of the tests: a token endpoint (OAuth client credentials) on this machine."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs


def unsecured_token(subject: str, life_s: float = 300.0, serial: int = 0) -> str:
    """An unsigned JWT, as a broker takes it with its unsecured validator."""
    now = time.time()
    claims = {"sub": subject, "iat": now, "exp": now + life_s, "jti": str(serial)}

    def encoded(part: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")

    return f"{encoded({'alg': 'none'})}.{encoded(claims)}."


@dataclass
class IdentityProvider:
    """What the endpoint knows and has seen.

    Attributes:
        url: address of the token endpoint.
        client_id: the only client.
        secret: its secret.
        life_s: life of the tokens.
        answer: status and body to answer instead of a token, None for a token.
        requests: forms of the requests so far.
    """

    client_id: str = "kmirror"
    secret: str = "hunter2-not-to-be-seen"
    life_s: float = 300.0
    url: str = ""
    answer: tuple[int, bytes] | None = None
    requests: list[dict[str, list[str]]] = field(default_factory=list)

    def respond(self, authorization: str, form: dict[str, list[str]]) -> tuple[int, bytes]:
        """Status and body for one request."""
        self.requests.append(form)
        if self.answer is not None:
            return self.answer
        expected = base64.b64encode(f"{self.client_id}:{self.secret}".encode()).decode()
        if authorization != f"Basic {expected}":
            return 401, json.dumps({"error": "invalid_client"}).encode()
        token = unsecured_token(self.client_id, self.life_s, len(self.requests))
        body = {"access_token": token, "token_type": "Bearer", "expires_in": self.life_s}
        return 200, json.dumps(body).encode()


@contextmanager
def identity_provider(context: ssl.SSLContext | None = None, **known: Any) -> Iterator[IdentityProvider]:
    """A token endpoint while the block runs, with TLS when a context is given."""
    provider = IdentityProvider(**known)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            status, body = provider.respond(self.headers.get("Authorization", ""), form)
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if 300 <= status < 400:
                self.send_header("Location", body.decode())
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on stderr."""

    class Server(ThreadingHTTPServer):
        def get_request(self) -> Any:
            sock, address = super().get_request()
            return (context.wrap_socket(sock, server_side=True) if context else sock), address

    server = Server(("127.0.0.1", 0), Handler)
    provider.url = f"{'https' if context else 'http'}://127.0.0.1:{server.server_port}/token"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
