// Stream a completion: node build/compiled/client.js ADDRESS PROMPT. Its types are generated from proto/.
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { GenerationService } from "./build/generated/specwire/v1/generation_pb.js";

const [address, prompt] = process.argv.slice(2);
if (!address || prompt === undefined) {
  console.error("usage: node client.js ADDRESS PROMPT");
  process.exit(2);
}
const service = createClient(GenerationService, createGrpcTransport({ baseUrl: `http://${address}` }));
const request = { prompt: { case: "text", value: prompt }, stopping: { maxTokens: 60 } } as const;
try {
  for await (const { event } of service.generate(request, { timeoutMs: 60_000 })) {
    if (event.case === "chunk") process.stdout.write(event.value.text);
    if (event.case === "finished") console.log(event.value.text);
  }
} catch (error) {
  const { code, rawMessage } = ConnectError.from(error);
  console.error(`status ${Code[code]}: ${rawMessage}`);
  process.exitCode = 1;
}
