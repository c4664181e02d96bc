// Service worker that caches the files of a page, so that it opens offline. `isthmus package page` fills in VERSION and FILES.
// Stored features are not cached here; they are in a browser database, with their age.

const VERSION = "";
const FILES = [];

const name = `isthmus-page-${new URL(registration.scope).pathname}`;

addEventListener("install", (event) => {
  event.waitUntil(caches.open(`${name}@${VERSION}`).then((cache) => cache.addAll(FILES.map((file) => new Request(file, { cache: "no-store" })))));
});

addEventListener("activate", (event) => {
  const old = (key) => key.startsWith(`${name}@`) && key !== `${name}@${VERSION}`;
  event.waitUntil(caches.keys().then((keys) => Promise.all(keys.filter(old).map((key) => caches.delete(key)))));
});

addEventListener("fetch", (event) => {
  if (event.request.method !== "GET") return;
  const kept = caches.open(`${name}@${VERSION}`).then((cache) => cache.match(event.request, { ignoreVary: true }));
  event.respondWith(kept.then((answer) => answer ?? fetch(event.request)));
});
