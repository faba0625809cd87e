// The server that the page came from: its key, its calls, and sockets that come back by themselves.

const RETRY_MS = [300, 1000, 2000, 5000];

export class Server extends EventTarget {
  constructor() {
    super();
    this.key = sessionStorage.getItem("holdfast-key");
    this.sampling = {};
    this.model = "";
    // No socket is opened before it is known whether the server wants a key.
    this.entered = new Promise((resolve) => (this.enter = resolve));
  }

  // How to sample for people to read; the server knows what the model suggests.
  async learn() {
    const answer = await this.call("GET", "/v1/models");
    if (!answer.ok) return;
    const served = (await answer.json()).data[0];
    this.sampling = served.chat_sampling ?? {};
    this.model = served.id;
  }

  useKey(key) {
    this.key = key;
    sessionStorage.setItem("holdfast-key", key);
  }

  call(method, path, body) {
    const headers = {};
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    return fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  }

  // What stands between the page and the server: "", "key", "starting" or "offline".
  async obstacle() {
    try {
      const answer = await this.call("GET", "/v1/sessions");
      if (answer.status === 401) return "key";
      return answer.ok ? "" : "starting";
    } catch {
      return "offline";
    }
  }

  open(path) {
    const url = new URL(path, location.href);
    url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
    const protocols = this.key ? ["holdfast", `holdfast.key64.${encoded(this.key)}`] : ["holdfast"];
    return new WebSocket(url, protocols);
  }

  // The page asks for a key when it hears this.
  refused() {
    this.dispatchEvent(new Event("refused"));
  }
}

// A key in letters that a subprotocol may have.
function encoded(key) {
  const letters = String.fromCharCode(...new TextEncoder().encode(key));
  return btoa(letters).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

// A socket that is opened again whenever it closes. `onup`, `onmessage` and `ondown` are for whoever made it.
export class Link {
  constructor(server, path) {
    this.server = server;
    this.path = path;
    this.tries = 0;
    this.ended = false;
    this.socket = null;
    this.onup = () => {};
    this.ondown = () => {};
    this.onmessage = () => {};
  }

  get up() {
    return this.socket !== null && this.socket.readyState === WebSocket.OPEN;
  }

  async start() {
    await this.server.entered;
    if (this.ended) return;
    const socket = this.server.open(this.path);
    socket.binaryType = "arraybuffer";
    this.socket = socket;
    socket.onopen = () => {
      this.tries = 0;
      this.onup();
    };
    socket.onmessage = (event) => this.onmessage(event.data);
    socket.onclose = (event) => this.closed(socket, event);
  }

  async closed(socket, event) {
    if (this.ended || socket !== this.socket) return;
    this.socket = null;
    this.ondown(event.code);
    if (event.code === 1008) return; // Somebody else has taken over, or we were too slow: once is enough.
    const obstacle = await this.server.obstacle();
    if (obstacle === "key") {
      this.server.refused();
      this.server.addEventListener("key", () => this.start(), { once: true });
      return;
    }
    const wait = RETRY_MS[Math.min(this.tries++, RETRY_MS.length - 1)];
    setTimeout(() => this.start(), wait);
  }

  say(message) {
    if (!this.up) return false;
    this.socket.send(JSON.stringify(message));
    return true;
  }

  end() {
    this.ended = true;
    const socket = this.socket;
    if (!socket) return;
    // A browser complains of a socket that is closed while it opens.
    if (socket.readyState === WebSocket.CONNECTING) socket.onopen = () => socket.close();
    else socket.close();
  }
}
