// The conversations as the server keeps them.

export class Archive {
  #base;
  #token;
  /** Exchanges that could not be saved: tried again with the next one, and when the connection is back. */
  #unsaved = new Map();
  /** The saves under way: the first one of a conversation makes it, and what changes it comes after. */
  #saving = Promise.resolve();

  /** @param {string} base address of the list @param {string} token against forged requests */
  constructor(base, token) {
    this.#base = base;
    this.#token = token;
  }

  async list(search, offset = 0) {
    return (await this.#call("GET", `?${new URLSearchParams({ q: search, offset })}`)).json();
  }

  async open(id) {
    return (await this.#call("GET", `${uuid(id)}/`)).json();
  }

  /** @returns {Promise<boolean>} whether all that should be kept is kept */
  async save(conversation, exchange) {
    this.#unsaved.set(exchange.id, { conversation, exchange });
    return this.saveRest();
  }

  saveRest() {
    const saving = this.#saveRest();
    this.#saving = Promise.all([this.#saving, saving]);
    return saving;
  }

  async #saveRest() {
    for (const [key, { conversation, exchange }] of [...this.#unsaved]) {
      const { id, parent, pair, question, answer } = exchange;
      const body = {
        question, answer, title: conversation.title, parent: uuid(parent), pair: uuid(pair), leaf: uuid(conversation.leaf),
        settings: conversation.settings,
      };
      this.#unsaved.delete(key); // what changes while it is on its way is saved by a call of its own
      try {
        await this.#call("PUT", `${uuid(conversation.id)}/exchanges/${uuid(id)}/`, body);
      } catch {
        if (!this.#unsaved.has(key)) this.#unsaved.set(key, { conversation, exchange });
      }
    }
    return this.#unsaved.size === 0;
  }

  async look(conversation) {
    await this.#saving;
    await this.#call("PATCH", `${uuid(conversation.id)}/`, { leaf: uuid(conversation.leaf) });
  }

  async configure(conversation) {
    await this.#saving;
    await this.#call("PATCH", `${uuid(conversation.id)}/`, { settings: conversation.settings });
  }

  async rename(id, title) {
    await this.#call("PATCH", `${uuid(id)}/`, { title });
  }

  async remove(id) {
    for (const [key, { conversation }] of this.#unsaved) if (conversation.id === id) this.#unsaved.delete(key);
    await this.#call("DELETE", `${uuid(id)}/`);
  }

  exportAddress(id, form) {
    return `${this.#base}${uuid(id)}/export.${form}`;
  }

  async #call(method, path, body) {
    const text = body && JSON.stringify(body, wellFormed);
    const response = await fetch(this.#base + path, {
      method,
      redirect: "manual",
      headers: body ? { "Content-Type": "application/json", "X-CSRFToken": this.#token } : { "X-CSRFToken": this.#token },
      body: text,
      // A change may be told while the page is left; browsers hold 64 KiB for such.
      keepalive: method === "PATCH" && text.length < 20_000,
    });
    if (!response.ok) throw new Error(`${method}: ${response.status}`);
    return response;
  }
}

const wellFormed = (_, value) => (typeof value === "string" ? value.toWellFormed?.() ?? value : value);
const uuid = (id) => id && id.replace(/^(.{8})(.{4})(.{4})(.{4})(.{12})$/, "$1-$2-$3-$4-$5");
