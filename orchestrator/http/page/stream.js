// Asks the orchestrator for one session and hands on its events, in order.

export class Refused extends Error {}

export async function follow(request, key, signal, take) {
  const response = await fetch("/console/generate", {
    method: "POST",
    headers: { "content-type": "application/json", ...authority(key) },
    body: JSON.stringify({ ...request, stream: true, logprobs: 0 }),
    signal,
  });
  if (!response.ok) throw new Refused(await reason(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refused("the stream broke");
    held += value;
    const lines = held.split("\n");
    held = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue; // a comment, or an event's end
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.type === "error") throw new Refused(told.message);
      take(told);
    }
  }
}

export async function status(key) {
  const response = await fetch("/console/status", { headers: authority(key) });
  if (!response.ok) throw new Refused(await reason(response));
  return response.json();
}

function authority(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
