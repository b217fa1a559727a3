// A client of GenerationService by Go's generator, from proto/ and PROTOCOL.md: generation_client ADDRESS, as the one by
// grpc-js beside it. Prints what it saw of each way to leave a session and come back, as one JSON object.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"time"

	specwire "example/specwire/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

const limit = 60 * time.Second

// event is what answers of Generate and of Watch have in common.
type event interface {
	GetStarted() *specwire.Started
	GetChunk() *specwire.Chunk
	GetFinished() *specwire.Finished
}

// seen is what a stream told until its end.
type seen struct {
	session  string
	position uint32
	hash     uint64
	tokens   []uint32
	text     string
	reason   string
	code     codes.Code
}

// extended is the hash of PROTOCOL.md, section 4.
func extended(hash uint64, token uint32) uint64 {
	mixed := (hash ^ (uint64(token) + 1)) + 0x9e3779b97f4a7c15
	mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9
	mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb
	return mixed ^ (mixed >> 31)
}

// read calls leave behind each chunk.
func read(next func() (event, error), leave func(*seen)) *seen {
	told := &seen{}
	for {
		got, err := next()
		if errors.Is(err, io.EOF) {
			return told
		}
		if err != nil {
			told.code = status.Code(err)
			return told
		}
		if started := got.GetStarted(); started != nil {
			told.session, told.position, told.hash = started.GetSessionId(), started.GetPromptTokens(), started.GetPromptHash()
		}
		if chunk := got.GetChunk(); chunk != nil {
			told.text += chunk.GetText()
			told.tokens = append(told.tokens, chunk.GetTokens()...)
			told.position += uint32(len(chunk.GetTokens()))
			for _, token := range chunk.GetTokens() {
				told.hash = extended(told.hash, token)
			}
			if leave != nil {
				leave(told)
			}
		}
		if finished := got.GetFinished(); finished != nil {
			told.text += finished.GetText()
			told.reason = finished.GetReason().String()
		}
	}
}

type client struct {
	specwire.GenerationServiceClient
}

func asked(tokens uint32, id string) *specwire.GenerateRequest {
	return &specwire.GenerateRequest{
		Prompt:    &specwire.GenerateRequest_Text{Text: "1 2 3"},
		Stopping:  &specwire.Stopping{MaxTokens: tokens, IgnoreEos: true},
		RequestId: id,
	}
}

// generate begins a stream with so much time; leave gets the function that breaks it off.
func (service client) generate(within time.Duration, request *specwire.GenerateRequest, leave func(func(), *seen)) *seen {
	limited, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	events, err := service.Generate(limited, request)
	if err != nil {
		return &seen{code: status.Code(err)}
	}
	var left func(*seen)
	if leave != nil {
		left = func(told *seen) { leave(cancel, told) }
	}
	return read(func() (event, error) { return events.Recv() }, left)
}

func (service client) watch(session string, position uint32, hash uint64) *seen {
	limited, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	request := &specwire.WatchRequest{SessionId: session, FromPosition: position, PrefixHash: &hash}
	events, err := service.Watch(limited, request)
	if err != nil {
		return &seen{code: status.Code(err)}
	}
	return read(func() (event, error) { return events.Recv() }, nil)
}

// ended waits for a session's end: its reason, or the code of a refusal.
func (service client) ended(session string) interface{} {
	for until := time.Now().Add(limit); time.Now().Before(until); time.Sleep(50 * time.Millisecond) {
		limited, cancel := context.WithTimeout(context.Background(), limit)
		found, err := service.GetSession(limited, &specwire.GetSessionRequest{SessionId: session})
		cancel()
		if err != nil {
			return status.Code(err)
		}
		if reason := found.GetFinishReason(); reason != specwire.FinishReason_FINISH_REASON_UNSPECIFIED {
			return reason.String()
		}
	}
	return "no end"
}

func main() {
	channel, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer channel.Close()
	service := client{specwire.NewGenerationServiceClient(channel)}
	whole := service.generate(limit, asked(60, ""), nil)

	// Another call ends it; this stream says so.
	asking := true
	cancelled := service.generate(limit, asked(4000, ""), func(_ func(), told *seen) {
		if asking {
			limited, done := context.WithTimeout(context.Background(), limit)
			defer done()
			service.Cancel(limited, &specwire.CancelRequest{SessionId: told.session})
		}
		asking = false
	})

	// The client goes; without a request id that is the session's end.
	left := service.generate(limit, asked(4000, ""), func(leave func(), _ *seen) { leave() })
	late := service.generate(1500*time.Millisecond, asked(4000, ""), nil)

	// With one it goes on, and Watch from the place that the client has reached.
	id := fmt.Sprintf("go-%d", os.Getpid())
	broken := service.generate(limit, asked(60, id), func(leave func(), _ *seen) { leave() })
	resumed := service.watch(broken.session, broken.position, broken.hash)
	repeated := service.generate(limit, asked(60, id), nil)
	other := service.watch(broken.session, broken.position, broken.hash^1)

	json.NewEncoder(os.Stdout).Encode(map[string]interface{}{
		"whole":     whole.text,
		"reason":    whole.reason,
		"cancelled": []interface{}{cancelled.code, cancelled.reason},
		"left":      []interface{}{left.code, service.ended(left.session)},
		"late":      []interface{}{late.code, service.ended(late.session)},
		"broken":    []interface{}{broken.code, len(broken.tokens) < 60},
		"resumed": []interface{}{
			resumed.code,
			reflect.DeepEqual(append(broken.tokens, resumed.tokens...), whole.tokens),
			broken.text + resumed.text,
		},
		"repeated": []interface{}{repeated.session == broken.session, repeated.text},
		"other":    other.code,
		"unknown":  service.ended("none"),
	})
}
