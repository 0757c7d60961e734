// One answer in the making: what came, what comes next, how to ask for the rest. Knows no page and no socket.

/** Phases: asked (sent, not accepted), running, finished. */
export class Generation {
  /** @param {{id: string, model: string, requestId?: string|null, nextSeq?: number, phase?: string, text?: string}} fields */
  constructor(fields) {
    this.id = fields.id;
    this.model = fields.model;
    this.requestId = fields.requestId ?? null;
    this.nextSeq = fields.nextSeq ?? 0;
    this.phase = fields.phase ?? "asked";
    this.text = fields.text ?? "";
    /** Of the queue it waited in; empty for the tenant's own. */
    this.tier = fields.tier ?? "";
    this.tail = fields.tail ?? false;
    this.finishReason = fields.finishReason ?? null;
    this.usage = fields.usage ?? null;
    this.error = fields.error ?? null;
    /** When trying again makes sense, in milliseconds since 1970; 0 is at once. */
    this.retryAt = fields.retryAt ?? 0;
    /** When and where this page saw its first token, for the live rate. */
    this.watched = null;
  }

  get isOver() {
    return this.phase === "finished";
  }

  /** What to send after a reconnect; null while there is nothing on the server that could be resumed. */
  resumeFrame(tenant) {
    if (this.isOver || !this.requestId) return null;
    const { id, requestId, model, nextSeq } = this;
    return { type: "resume", id, request_id: requestId, model, from_seq: nextSeq, tenant };
  }

  /**
   * Takes one server frame.
   * @returns {string} the text that is new with it: empty for a frame that was seen before the connection dropped
   */
  apply(frame) {
    if (this.isOver) return "";
    switch (frame.type) {
      case "started":
        this.requestId = frame.request_id;
        this.phase = "running";
        return "";
      case "delta":
        return this.#applyDelta(frame);
      case "usage":
        this.usage = frame;
        return "";
      case "done":
        this.finishReason = frame.finish_reason;
        this.phase = "finished";
        return "";
      case "error":
        this.fail(frame.error);
        if (frame.retry_after_ms) this.retryAt = Date.now() + frame.retry_after_ms;
        return "";
      default:
        return ""; // A newer server may say more.
    }
  }

  fail(error) {
    this.error = error;
    this.phase = "finished";
  }

  #applyDelta(frame) {
    // A delta without tokens is the text that was held back until the end; it comes at most once.
    if (frame.seq < this.nextSeq || (frame.tokens === 0 && frame.text && this.tail)) return "";
    if (frame.tokens === 0 && frame.text) this.tail = true;
    this.phase = "running";
    this.nextSeq = frame.seq + frame.tokens;
    this.watched ??= { since: performance.now(), fromSeq: this.nextSeq };
    this.text += frame.text;
    return frame.text;
  }

  /** Tokens per second as seen here since the first delta; the server's own figure comes with the usage. */
  liveRate() {
    if (!this.watched) return null;
    const seconds = (performance.now() - this.watched.since) / 1000;
    const tokens = this.nextSeq - this.watched.fromSeq;
    return seconds > 0.25 && tokens > 0 ? tokens / seconds : null;
  }

  toJSON() {
    const { id, model, tier, requestId, nextSeq, phase, text, tail, finishReason, usage, error, retryAt } = this;
    return { id, model, tier, requestId, nextSeq, phase, text, tail, finishReason, usage, error, retryAt };
  }
}
