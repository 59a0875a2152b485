"A web server for tests, with the faults that real ones have."

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Web(BaseHTTPRequestHandler):
    "Serves `body` with ranges; the first `breaks` answers end after a third of what was asked for."

    body, ranges, breaks, asked = b'', True, 0, []

    def log_message(self, *args):
        pass

    def do_GET(self):
        asked = self.headers.get('Range')
        type(self).asked.append(asked)
        start = int(asked[6:-1]) if asked and self.ranges else 0
        send = self.body[start:]
        self.send_response(206 if asked and self.ranges else 200)
        self.send_header('Content-Length', str(len(send)))
        self.end_headers()
        if self.breaks > 0:
            type(self).breaks -= 1
            send = send[: len(send) // 3]
        self.wfile.write(send)


@contextlib.contextmanager
def served(handler):
    "Runs a server with this handler; gives its address."
    server = ThreadingHTTPServer(('127.0.0.1', 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f'http://127.0.0.1:{server.server_port}'
    finally:
        server.shutdown()
        server.server_close()
