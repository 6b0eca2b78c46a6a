// What a page of ours must hold in every width and theme; run in a browser by `tests/support/browser.py`.

// Texts on the screen whose contrast with what is behind them is below `least`, as WCAG 2 counts it.
function faintTexts(least) {
  const parse = text => { const m = text.match(/[\d.]+/g).map(Number); return [m[0], m[1], m[2], m[3] ?? 1]; };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const over = (top, below) => [0, 1, 2].map(k => top[k] * top[3] + below[k] * (1 - top[3])).concat(1);
  const behind = element => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      const style = getComputedStyle(at);
      if (at.namespaceURI.endsWith("svg") && at.tagName !== "svg") {
        const rect = at.tagName === "g" && at.querySelector("rect");
        if (rect) { const fill = getComputedStyle(rect).fill; return fill.startsWith("url") ? null : parse(fill); }
      }
      if (style.backgroundImage !== "none" && /gradient/.test(style.backgroundImage)) {
        const colours = style.backgroundImage.match(/rgba?\([^)]*\)/g) || [];
        return parse(colours[colours.length - 1]);
      }
      const colour = parse(style.backgroundColor);
      layers.push(colour);
      if (colour[3] === 1) break;
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement, text = node.textContent.trim();
    if (!text || ["SCRIPT", "STYLE", "OPTION", "title"].includes(element.tagName)) continue;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || box.bottom < 0 || box.top > innerHeight || element.closest(":disabled")) continue;
    const style = getComputedStyle(element), ground = behind(element);
    if (!ground || style.visibility === "hidden") continue;
    const ink = over(parse(element.namespaceURI.endsWith("svg") ? style.fill : style.color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x), ratio = (a + 0.05) / (b + 0.05);
    if (ratio < least) found.push(`${ratio.toFixed(2)} ${text.slice(0, 40)} (${element.tagName}.${element.className})`);
  }
  return [...new Set(found)];
}

const widerThanTheScreen = () => document.documentElement.scrollWidth > innerWidth;
