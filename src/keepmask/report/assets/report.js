"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const card = document.getElementById("card");
  const texts = document.getElementById("texts");
  let current = null;

  const make = (tag, className, text) => {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const percent = (share) => {
    const value = 100 * share;
    return (value >= 9.95 ? value.toFixed(0) : value >= 0.095 ? value.toFixed(1) : "<0.1") + " %";
  };
  const ratio = (logRatio) => Math.exp(logRatio).toFixed(Math.abs(logRatio) > 5e-3 ? 3 : 6);

  const row = (text, share, drawn) => {
    const line = make("div", drawn ? "row drawn" : "row");
    const seen = text.replace(/^ +/, (spaces) => "␣".repeat(spaces.length));
    line.append(make("code", "", seen), make("i"), make("span", "", share < 0 ? "" : percent(share)));
    line.children[1].style.width = Math.max(0, 100 * share) + "%";
    return line;
  };

  const supportRows = (columns, t) => {
    const pairs = columns.supports[t];
    const size = columns.sizes[t];
    const lines = [];
    let mass = 0;
    for (let i = 0; i < pairs.length; i += 2) {
      const share = pairs[i + 1] < 0 ? -1 : pairs[i + 1] * data.unit;
      mass += Math.max(0, share);
      lines.push(row(data.texts[pairs[i]][1], share, pairs[i] === columns.drawn[t]));
    }
    const rest = size - pairs.length / 2;
    if (rest > 0) lines.push(row("+ " + rest + " more", pairs[1] < 0 ? -1 : Math.max(0, 1 - mass), false));
    return lines;
  };

  const known = (columns, name, t) => columns[name] && columns[name][t] !== null;

  const supportNote = (columns, t) => {
    if (!columns.sizes) return "No support was recorded.";
    const size = columns.sizes[t];
    if (!size) return "Any id of the vocabulary could be drawn.";
    const could = size === 1 ? "Only this id could be drawn" : size + " ids could be drawn";
    const kept = known(columns, "replayed", t) && known(columns, "full", t);
    const mass = kept ? ", with " + percent(Math.exp(columns.full[t] - columns.replayed[t])) + " of the probability" : "";
    const unknown = columns.supports[t][1] < 0 && size > 1 ? " Their probabilities were not recorded." : "";
    return could + mass + "." + unknown;
  };

  const scores = (columns, t) => {
    const line = make("div", "note");
    if (!known(columns, "logprobs", t)) return line;
    line.append("log-prob " + columns.logprobs[t].toFixed(3).replace("-", "\u2212"));
    const scored = ["full", "replayed"].filter((name) => known(columns, name, t));
    scored.forEach((name, i) => {
      const value = ratio(columns[name][t] - columns.logprobs[t]);
      line.append(i ? ", " : " · ratio ", make("b", name, value + " " + name));
    });
    return line;
  };

  const fill = (token) => {
    const columns = data.rollouts[token.parentElement.dataset.rollout];
    const t = Array.prototype.indexOf.call(token.parentElement.children, token);
    const [id, text] = data.texts[columns.drawn[t]];
    const title = make("div", "title");
    title.append(make("b", "", text), make("span", "", "token " + (t + 1) + " · id " + id));
    const rows = columns.sizes && columns.sizes[t] ? supportRows(columns, t) : [];
    card.replaceChildren(title, ...rows, make("div", "note", supportNote(columns, t)), scores(columns, t));
  };

  const place = (token) => {
    const box = token.getClientRects()[0];
    card.hidden = false;
    const { width, height } = card.getBoundingClientRect();
    const view = document.documentElement.clientWidth;
    const below = box.bottom + 8 + height <= window.innerHeight || box.top < height + 8;
    card.style.left = window.scrollX + Math.max(8, Math.min(box.left, view - width - 8)) + "px";
    card.style.top = window.scrollY + (below ? box.bottom + 8 : box.top - height - 8) + "px";
  };

  const hide = () => {
    if (!current) return;
    current.classList.remove("on");
    current.removeAttribute("aria-describedby");
    current = null;
    card.hidden = true;
  };
  const show = (token) => {
    if (token === current) return;
    hide();
    current = token;
    token.classList.add("on");
    token.setAttribute("aria-describedby", "card");
    fill(token);
    place(token);
  };
  const tokenOf = (event) => event.target.closest && event.target.closest(".tokens > span");

  const focus = (token) => {
    if (!token) return;
    for (const other of token.parentElement.querySelectorAll('[tabindex="0"]')) other.tabIndex = -1;
    token.tabIndex = 0;
    token.focus();
  };
  const firstOf = (tokens, step) => {
    const all = [...texts.querySelectorAll(".tokens")];
    const other = all[all.indexOf(tokens) + step];
    return other && (other.querySelector('[tabindex="0"]') || other.firstElementChild);
  };
  const moves = {
    ArrowRight: (token) => token.nextElementSibling,
    ArrowLeft: (token) => token.previousElementSibling,
    Home: (token) => token.parentElement.firstElementChild,
    End: (token) => token.parentElement.lastElementChild,
    ArrowDown: (token) => firstOf(token.parentElement, 1),
    ArrowUp: (token) => firstOf(token.parentElement, -1),
  };

  const toTarget = () => {
    const token = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (token && token.closest(".tokens")) {
      token.scrollIntoView({ block: "center" });
      token.tabIndex = -1;
      focus(token);
    }
  };

  if (texts) {
    for (const tokens of texts.querySelectorAll(".tokens")) {
      if (tokens.firstElementChild) tokens.firstElementChild.tabIndex = 0;
    }
    texts.addEventListener("mouseover", (event) => {
      const token = tokenOf(event);
      if (token) show(token);
      else if (!texts.contains(document.activeElement)) hide();
    });
    texts.addEventListener("mouseleave", () => {
      const focused = document.activeElement;
      if (focused && focused.matches(".tokens > span")) show(focused);
      else hide();
    });
    texts.addEventListener("click", (event) => focus(tokenOf(event)));
    texts.addEventListener("focusin", (event) => {
      const token = tokenOf(event);
      if (token) show(token);
    });
    texts.addEventListener("focusout", hide);
    texts.addEventListener("keydown", (event) => {
      const token = tokenOf(event);
      if (event.key === "Escape") hide();
      if (!token || !moves[event.key] || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const next = moves[event.key](token);
      if (next) {
        next.tabIndex = -1;
        focus(next);
      }
    });
    texts.addEventListener("change", (event) => {
      if (event.target.name === "shade") texts.className = event.target.value;
    });
    const shade = document.getElementById("shade");
    if (shade) shade.hidden = false;
    window.addEventListener("hashchange", toTarget);
    window.addEventListener("resize", () => current && place(current));
    toTarget();
  }

  const theme = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const chosen = themes[(themes.indexOf(document.documentElement.dataset.theme || "auto") + 1) % themes.length];
    document.documentElement.dataset.theme = chosen;
    theme.textContent = "Theme: " + chosen;
  });
})();
