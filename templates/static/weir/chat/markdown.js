// What a model writes, as markdown. Nothing of it ever runs: HTML in it is shown as text, what the parser makes of
// the rest is sanitised, pictures become links (else an answer could make the browser call addresses), and the
// page's content security policy allows no script but our own.

import { Marked } from "../../vendor/marked.esm.js";
import "../../vendor/purify.min.js";
import { announce, copyText } from "../console.js";

const { DOMPurify } = globalThis;
const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote", "ul", "ol", "li", "a",
    "table", "thead", "tbody", "tr", "th", "td", "span",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align", "class", "rel", "target"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
/** Grammars in static/vendor/highlight, by the names that models use for them. */
const LANGUAGES = {
  bash: "bash", sh: "bash", zsh: "bash", c: "c", h: "c", cpp: "cpp", "c++": "cpp", cs: "csharp", csharp: "csharp", css: "css",
  diff: "diff", patch: "diff", dockerfile: "dockerfile", docker: "dockerfile", go: "go", golang: "go", graphql: "graphql",
  ini: "ini", toml: "ini", java: "java", js: "javascript", jsx: "javascript", javascript: "javascript", json: "json",
  kotlin: "kotlin", kt: "kotlin", lua: "lua", make: "makefile", makefile: "makefile", md: "markdown", markdown: "markdown",
  nginx: "nginx", php: "php", py: "python", python: "python", python3: "python", r: "r", rb: "ruby", ruby: "ruby",
  rs: "rust", rust: "rust", scala: "scala", console: "shell", shell: "shell", sql: "sql", swift: "swift", ts: "typescript",
  tsx: "typescript", typescript: "typescript", html: "xml", svg: "xml", xml: "xml", yaml: "yaml", yml: "yaml",
};
const LONGEST_HIGHLIGHTED = 20_000;

const escape = (text) =>
  text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    // A page has one h1, and each answer an h2: what a model heads comes below.
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>\n`;
    },
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
    code: ({ text, lang }) => {
      const name = (lang ?? "").trim().split(/\s/)[0].toLowerCase();
      const known = Object.hasOwn(LANGUAGES, name) ? ` class="language-${LANGUAGES[name]}"` : "";
      return `<pre><code${known}>${escape(text)}\n</code></pre>\n`;
    },
  },
});

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  }
  if (node.hasAttribute?.("class") && !/^(language-[a-z]+|hljs-[a-z_ -]+)$/.test(node.className)) node.removeAttribute("class");
});

/** Keeps `element` showing a growing markdown text; blocks that are complete are not touched again. */
export class Markdown {
  #element;
  #raws = [];

  constructor(element) {
    this.#element = element;
  }

  /** @param {string} text all of it @param {boolean} isWhole whether nothing follows */
  show(text, isWhole) {
    const tokens = marked.lexer(text);
    const blocks = tokens.filter(({ type }) => type !== "space" && type !== "def");
    blocks.forEach((block, index) => {
      const isLast = index === blocks.length - 1;
      const node = this.#element.children[index];
      if (this.#raws[index] !== block.raw) {
        const fresh = document.createElement("div");
        fresh.append(this.#render(block, tokens.links));
        if (node) node.replaceWith(fresh);
        else this.#element.append(...(index ? ["\n"] : []), fresh);
        this.#raws[index] = block.raw;
      }
      if (!isLast || isWhole) this.#finish(this.#element.children[index]);
    });
    while (this.#element.children.length > blocks.length) {
      this.#element.lastElementChild.remove();
      if (this.#element.lastChild?.nodeType === Node.TEXT_NODE) this.#element.lastChild.remove();
    }
    this.#raws.length = blocks.length;
  }

  #render(block, links) {
    const tokens = Object.assign([block], { links });
    return DOMPurify.sanitize(marked.parser(tokens).trimEnd(), ALLOWED);
  }

  #finish(block) {
    if (block.dataset.finished !== undefined) return;
    block.dataset.finished = "";
    for (const table of block.querySelectorAll("table")) {
      const wrap = document.createElement("div");
      wrap.className = "table-wrap";
      wrap.tabIndex = 0;
      wrap.setAttribute("role", "region");
      wrap.setAttribute("aria-label", "Table, scrollable");
      table.replaceWith(wrap);
      wrap.append(table);
    }
    for (const pre of block.querySelectorAll("pre")) {
      pre.tabIndex = 0;
      pre.setAttribute("role", "region");
      pre.setAttribute("aria-label", "Code");
      const code = pre.firstElementChild;
      const language = code?.className.replace("language-", "");
      if (language && code.textContent.length <= LONGEST_HIGHLIGHTED) void highlight(code, language);
      const box = document.createElement("div");
      box.className = "code-box";
      pre.replaceWith(box);
      box.append(pre, copyButton(pre));
    }
  }
}

function copyButton(pre) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "button quiet small";
  button.textContent = "Copy";
  button.setAttribute("aria-label", "Copy the code");
  button.addEventListener("click", async () => {
    const isCopied = await copyText(pre.textContent);
    button.textContent = isCopied ? "Copied" : "Refused";
    announce(isCopied ? "Copied to the clipboard" : "Copying was refused by the browser");
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
  return button;
}

/** The grammars come when a block needs one, once. */
async function highlight(code, language) {
  try {
    const [{ default: hljs }, { default: grammar }] = await Promise.all([
      import("../../vendor/highlight/core.min.js"),
      import(`../../vendor/highlight/${language}.min.js`),
    ]);
    if (!hljs.getLanguage(language)) hljs.registerLanguage(language, grammar);
    const { value } = hljs.highlight(code.textContent, { language, ignoreIllegals: true });
    code.replaceChildren(DOMPurify.sanitize(value, ALLOWED));
  } catch {
    // Without colours it is as readable.
  }
}
