// Offers the other versions of the site, where it has some: versions.js beside their folders lists them. It is a script
// and no JSON, since pages that are opened as files may not fetch any.
document.addEventListener("DOMContentLoaded", () => {
  const here = document.documentElement.dataset.content_root || "./";
  const list = document.createElement("script");
  list.src = `${here}../versions.list.js`;
  list.onload = () => {
    const known = window.TILEWRIGHT_VERSIONS || [];
    const now = new URL(here, location.href).pathname.split("/").filter(Boolean).pop();
    if (!known.includes(decodeURIComponent(now || ""))) return;
    const box = document.createElement("div");
    box.className = "versions";
    const select = document.createElement("select");
    select.setAttribute("aria-label", "Version");
    for (const name of known) {
      select.add(new Option(name, name, false, name === decodeURIComponent(now)));
    }
    select.onchange = () => {
      location.href = new URL(`${here}../${encodeURIComponent(select.value)}/docs/index.html`, location.href);
    };
    box.append(select);
    document.querySelector(".sidebar-brand")?.after(box);
  };
  document.head.append(list);
});
