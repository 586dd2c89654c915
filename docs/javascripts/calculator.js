// Shows rows of calculator.json, which `python -m tests.pages.calculator_page` writes. Nothing is computed but sums.
"use strict";

const COLOURS = ["#1f4e8c", "#3a7d44", "#e0a458", "#8d6cab", "#b3261e"];
const GIB = 1024;

function inWords(mib) {
  return mib >= GIB ? `${(mib / GIB).toFixed(2)} GiB` : `${mib} MiB`;
}

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function choice(label, options, chosen) {
  const select = element("select", { "aria-label": label });
  options.forEach((text, at) => select.append(element("option", { value: at }, text)));
  select.value = chosen;
  return { select, row: element("label", {}, `${label} `, select) };
}

// One bar: its parts beside the memory that tensors can take.
function bar(parts, names, usable, widest) {
  const pieces = parts.map((mib, at) => {
    const title = `${names[at]}: ${inWords(mib)}`;
    return element("span", { title, style: `width:${(100 * mib) / widest}%;background:${COLOURS[at]}` });
  });
  const limit = element("i", { style: `left:${(100 * usable) / widest}%`, title: `usable: ${inWords(usable)}` });
  return element("div", { class: "bar" }, ...pieces, limit);
}

function rows(data, picked) {
  const sizes = data.models[picked.model].mib[picked.ranks][picked.length];
  const card = data.cards[picked.card];
  const usable = data.ranks[picked.ranks] > 1 ? card.several : card.alone;
  const names = data.parts.slice(0, -1);
  const totals = sizes.map((way) => way[picked.again].slice(0, -1).reduce((sum, mib) => sum + mib, 0));
  const widest = Math.max(usable * 1.05, Math.min(Math.max(...totals), usable * 3));
  return sizes.map((way, at) => {
    const parts = way[picked.again].slice(0, -1);
    const host = way[picked.again].at(-1);
    const fits = totals[at] <= usable;
    return element(
      "tr", { class: fits ? "fits" : "large" },
      element("td", {}, data.ways[at].name), element("td", {}, bar(parts, names, usable, widest)),
      element("td", {}, inWords(totals[at])), element("td", {}, host ? inWords(host) : ""),
      element("td", {}, fits ? "fits" : "too large"),
    );
  });
}

function begin(place, data) {
  const models = Object.keys(data.models);
  const cards = Object.keys(data.cards);
  const fields = {
    model: choice("Model", models, 1),
    card: choice("GPU", cards, 2),
    ranks: choice("Number of GPUs", data.ranks, 1),
    length: choice("Tokens per sequence", data.lengths.map((n) => n.toLocaleString("en")), 1),
    again: choice("Recompute activations", ["no", "yes"], 0),
  };
  const body = element("tbody");
  const said = element("p");
  const [json, command] = [0, 1].map(() => element("pre", {}, element("code")));
  const names = data.parts.slice(0, -1);
  const key = element("p", { class: "key" });
  names.forEach((name, at) => key.append(element("span", { style: `background:${COLOURS[at]}` }), name));
  key.append(element("i"), "what tensors can take");

  function draw() {
    const at = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, Number(field.select.value)]));
    const picked = { ...at, model: models[at.model], card: cards[at.card] };
    const made = rows(data, picked);
    body.replaceChildren(...made);
    const first = made.findIndex((row) => row.className === "fits");
    json.hidden = command.hidden = first < 0;
    said.textContent = first < 0
      ? "Nothing fits. More GPUs, shorter sequences or recomputation help, and tensor or pipeline parallelism."
      : `${data.ways[first].name} is the first way that fits. This is its ds_config.json, and the command that estimates it:`;
    if (first < 0) return;
    json.firstChild.textContent = JSON.stringify(data.ways[first].json[at.again], null, 2);
    command.firstChild.textContent =
      `launch memory-estimate --config ds_config.json --model MODEL --num-gpus ${data.ranks[at.ranks]} \\\n` +
      `    --seq-length ${data.lengths[at.length]} --gpu "${data.cards[picked.card].type}"`;
  }

  const head = ["", "at the peak of a step", "on a GPU", "host memory of a rank", ""];
  const form = element("form", {}, ...Object.values(fields).map((field) => field.row));
  form.addEventListener("change", draw);
  place.replaceChildren(
    form, key,
    element("table", {}, element("thead", {}, element("tr", {}, ...head.map((text) => element("th", {}, text)))), body),
    said, json, command,
  );
  draw();
}

const here = document.currentScript.src;
fetch(new URL("../calculator.json", here))
  .then((answer) => answer.json())
  .then((data) => begin(document.getElementById("calculator"), data))
  .catch((error) => {
    document.getElementById("calculator").textContent = `The numbers could not be read: ${error.message}`;
  });
