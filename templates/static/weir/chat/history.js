// The list of conversations beside the chat: search, open, rename, export, delete.

import { announce } from "../console.js";

const SEARCH_AFTER_MS = 250;
const WIDE = matchMedia("(min-width: 70rem)");
const byId = (id) => document.getElementById(id);

export class History {
  #archive;
  #actions;
  #current = null;
  #timer = 0;
  #asked = 0;
  #shown = 0;

  /** @param {Archive} archive @param {{open: (id: string) => void, removed: (id: string) => void, renamed: (id: string, title: string) => void}} actions */
  constructor(archive, actions) {
    this.#archive = archive;
    this.#actions = actions;
    byId("history-search").addEventListener("input", () => {
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.refresh(), SEARCH_AFTER_MS);
    });
    byId("history-toggle").addEventListener("click", () => this.#show(byId("history").hidden));
    byId("history-more").addEventListener("click", () => this.#load(this.#shown));
    byId("history").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || event.defaultPrevented) return;
      event.stopPropagation();
      this.#show(false);
      byId("history-toggle").focus();
    });
    this.#show(WIDE.matches);
  }

  set current(id) {
    this.#current = id;
    for (const item of byId("history-list").children) this.#mark(item);
  }

  refresh() {
    return this.#load(0);
  }

  async #load(offset) {
    const asked = ++this.#asked;
    const search = byId("history-search").value.trim();
    const note = byId("history-note");
    try {
      const { conversations, has_more: hasMore } = await this.#archive.list(search, offset);
      if (asked !== this.#asked) return; // a later question is under way
      this.#put(conversations, offset);
      this.#shown = offset + conversations.length;
      byId("history-more").hidden = !hasMore;
      note.textContent = this.#shown ? "" : search ? "Nothing found." : "What you ask is kept here, for you alone.";
    } catch {
      note.textContent = "The list can’t be read right now.";
    }
    note.hidden = !note.textContent;
  }

  /** What is listed already stays where it is, with the menu that is open in it or the name that is being typed. */
  #put(conversations, offset) {
    const list = byId("history-list");
    const known = new Map([...list.children].map((item) => [item.dataset.id, item]));
    let next = list.children[offset] ?? null;
    for (const one of conversations) {
      const item = known.get(one.id.replaceAll("-", "")) ?? this.#item(one);
      const link = item.querySelector(".history-link"); // away while a new name is typed in its place
      if (link) this.#entitle(item, link, one.title);
      if (item === next) next = next.nextElementSibling;
      else list.insertBefore(item, next);
    }
    while (next) {
      const gone = next;
      next = next.nextElementSibling;
      gone.remove();
    }
  }

  #item({ id, title }) {
    const item = byId("history-item").content.firstElementChild.cloneNode(true);
    item.dataset.id = id.replaceAll("-", "");
    const link = item.querySelector("a");
    this.#entitle(item, link, title);
    link.href = `?c=${id}`;
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      this.#actions.open(item.dataset.id);
      if (!WIDE.matches) this.#show(false);
    });
    for (const form of ["json", "md"]) {
      item.querySelector(`[data-export="${form}"]`).href = this.#archive.exportAddress(item.dataset.id, form);
    }
    item.querySelector('[data-action="rename"]').addEventListener("click", () => this.#rename(item));
    item.querySelector('[data-action="delete"]').addEventListener("click", () => this.#askToDelete(item));
    this.#mark(item);
    return item;
  }

  #entitle(item, link, title) {
    link.textContent = link.title = title;
    item.querySelector("summary").setAttribute("aria-label", `Actions for ${title}`);
  }

  #mark(item) {
    const link = item.querySelector(".history-link");
    if (!link) return; // marked once it is back
    if (item.dataset.id === this.#current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }

  #rename(item) {
    const link = item.querySelector("a");
    const menu = item.querySelector("details");
    menu.open = false;
    const box = Object.assign(document.createElement("input"), { value: link.textContent, maxLength: 120 });
    box.setAttribute("aria-label", "New title");
    let isOver = false;
    const end = async (keep) => {
      if (isOver) return;
      isOver = true;
      const title = box.value.trim();
      box.replaceWith(link);
      this.#mark(item);
      menu.querySelector("summary").focus();
      if (!keep || !title || title === link.textContent) return;
      try {
        await this.#archive.rename(item.dataset.id, title);
        this.#entitle(item, link, title);
        this.#actions.renamed(item.dataset.id, title);
      } catch {
        announce("Renaming failed");
      }
    };
    box.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.preventDefault();
      if (event.key === "Enter" || event.key === "Escape") void end(event.key === "Enter");
    });
    box.addEventListener("blur", () => void end(true));
    link.replaceWith(box);
    box.select();
  }

  #askToDelete(item) {
    item.querySelector("details").open = false;
    const dialog = byId("delete-dialog");
    byId("delete-title").textContent = `Delete “${item.querySelector("a").textContent}”?`;
    dialog.returnValue = "";
    dialog.addEventListener("close", () => { if (dialog.returnValue === "delete") void this.#delete(item); }, { once: true });
    dialog.showModal();
  }

  async #delete(item) {
    try {
      await this.#archive.remove(item.dataset.id);
    } catch {
      announce("Deleting failed");
      return;
    }
    this.#actions.removed(item.dataset.id);
    announce("Deleted");
    await this.refresh();
    byId("history-search").focus();
  }

  #show(visible) {
    byId("history").hidden = !visible;
    byId("history-toggle").setAttribute("aria-expanded", String(visible));
  }
}
