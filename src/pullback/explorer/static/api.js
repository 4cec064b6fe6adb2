// Questions to the server. A newer question of the same kind takes the place of an older one.

const token = new URLSearchParams(location.hash.slice(1)).get("token");
const pending = new Map();

async function send(name, lane, body) {
  pending.get(lane)?.abort();
  const controller = new AbortController();
  pending.set(lane, controller);
  const headers = { "Content-Type": "application/json", ...(token ? { Authorization: `Bearer ${token}` } : {}) };
  const response = await fetch(`/api/${name}`, { method: "POST", headers, body: JSON.stringify(body), signal: controller.signal });
  if (response.ok) return response;
  throw new Error((await response.json()).error);
}

export const ask = async (name, body, lane = "solve") => (await send(name, lane, body)).json();
export const file = async (body) => (await send("export", "export", body)).blob();
// Nobody waits for a question that a newer one replaced.
export const superseded = (error) => error.name === "AbortError";
