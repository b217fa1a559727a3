// Stream a completion: build/client ADDRESS PROMPT. Its stubs are generated from proto/ and compiled by `make go`.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	specwire "example/specwire/v1"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

func main() {
	if len(os.Args) != 3 || os.Args[1] == "" {
		fmt.Fprintln(os.Stderr, "usage: client ADDRESS PROMPT")
		os.Exit(2)
	}
	if err := stream(os.Args[1], os.Args[2]); err != nil {
		told := status.Convert(err)
		fmt.Fprintf(os.Stderr, "status %s: %s\n", told.Code(), told.Message())
		os.Exit(1)
	}
}

// stream prints the text while it comes.
func stream(address, prompt string) error {
	// Since grpc 1.34 also grpc.WithTransportCredentials(insecure.NewCredentials()), which Debian 12 does not have yet.
	channel, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer channel.Close()
	limited, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	request := &specwire.GenerateRequest{
		Prompt:   &specwire.GenerateRequest_Text{Text: prompt},
		Stopping: &specwire.Stopping{MaxTokens: 60},
	}
	events, err := specwire.NewGenerationServiceClient(channel).Generate(limited, request)
	if err != nil {
		return err
	}
	for {
		event, err := events.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if chunk := event.GetChunk(); chunk != nil {
			fmt.Print(chunk.GetText())
		}
		if finished := event.GetFinished(); finished != nil {
			fmt.Println(finished.GetText())
		}
	}
}
