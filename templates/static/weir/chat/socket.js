// One websocket that comes back: exponential backoff with jitter, and a state that the page shows.

const FIRST_DELAY_MS = 400;
const LONGEST_DELAY_MS = 15_000;
const FAILURES_BEFORE_ASKING = 3;
/** The server's word for "sign in first". */
const CLOSE_SIGNED_OUT = 4401;

/**
 * Events: "state" ({state, delayMs}) and "frame" (a parsed JSON frame).
 * States: connecting, open, waiting (will try again), ended (the session is over; only signing in helps).
 */
export class ChatSocket extends EventTarget {
  #url;
  #socket = null;
  #failures = 0;
  #timer = 0;
  state = "connecting";

  /** @param {string} path of the websocket on this very host */
  constructor(path) {
    super();
    const url = new URL(path, location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    this.#url = url.href;
    addEventListener("online", () => this.retryNow());
    addEventListener("offline", () => this.#socket?.close());
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.retryNow();
    });
  }

  connect() {
    clearTimeout(this.#timer);
    this.#setState("connecting");
    const socket = new WebSocket(this.#url);
    this.#socket = socket;
    socket.addEventListener("open", () => {
      if (socket !== this.#socket) return;
      this.#failures = 0;
      this.#setState("open");
    });
    socket.addEventListener("message", (event) => {
      if (socket !== this.#socket) return;
      this.dispatchEvent(new CustomEvent("frame", { detail: JSON.parse(event.data) }));
    });
    socket.addEventListener("close", (event) => {
      if (socket === this.#socket) void this.#onClose(event.code);
    });
  }

  /** @returns {boolean} false when the frame could not be handed over */
  send(frame) {
    if (this.#socket?.readyState !== WebSocket.OPEN) return false;
    this.#socket.send(JSON.stringify(frame));
    return true;
  }

  retryNow() {
    if (this.state === "waiting") this.connect();
  }

  async #onClose(code) {
    this.#socket = null;
    this.#failures += 1;
    if (code === CLOSE_SIGNED_OUT) {
      this.#setState("ended");
      return;
    }
    if (this.#failures >= FAILURES_BEFORE_ASKING && await this.#sessionEnded()) {
      this.#setState("ended");
      return;
    }
    const longest = Math.min(LONGEST_DELAY_MS, FIRST_DELAY_MS * 2 ** (this.#failures - 1));
    const delayMs = longest * (0.5 + Math.random() / 2);
    this.#setState("waiting", delayMs);
    this.#timer = setTimeout(() => this.connect(), delayMs);
  }

  /** The handshake does not say why it was refused; this page does: signed out, it redirects to the login. */
  async #sessionEnded() {
    try {
      const response = await fetch(location.href, { method: "HEAD", redirect: "manual", cache: "no-store" });
      return response.type === "opaqueredirect" || response.status === 404;
    } catch {
      return false;
    }
  }

  #setState(state, delayMs = 0) {
    this.state = state;
    this.dispatchEvent(new CustomEvent("state", { detail: { state, delayMs } }));
  }
}
