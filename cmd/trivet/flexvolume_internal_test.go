package main

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/trivet-csi/trivet/flexvolume"
)

// TestAnswerInTime: a call that hangs in the kernel is answered for before the volume
// manager's two minutes are over, and ends the process as any that failed.
func TestAnswerInTime(t *testing.T) {
	for name, tc := range map[string]struct {
		call   func(ctx context.Context, end <-chan struct{}) flexvolume.Answer
		answer string
		took   time.Duration
		err    error
	}{
		"done": {
			func(context.Context, <-chan struct{}) flexvolume.Answer {
				return flexvolume.Answer{Status: flexvolume.Success}
			},
			`{"status":"Success"}`, 0, nil,
		},
		"out of time": {
			func(ctx context.Context, _ <-chan struct{}) flexvolume.Answer {
				<-ctx.Done()
				return flexvolume.Answer{Status: flexvolume.Failure, Message: ctx.Err().Error()}
			},
			`{"status":"Failure","message":"context deadline exceeded"}`, 110 * time.Second, errAnswered,
		},
		"hanging": {
			func(_ context.Context, end <-chan struct{}) flexvolume.Answer {
				<-end
				return flexvolume.Answer{Status: flexvolume.Success}
			},
			`{"status":"Failure","message":"timed out after 1m50s: the storage of the volume does not answer; the kubelet retries"}`, 115 * time.Second, errAnswered,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				end := make(chan struct{})
				defer close(end)
				var out bytes.Buffer
				began := time.Now()
				err := answerInTime(&out, func(ctx context.Context) flexvolume.Answer { return tc.call(ctx, end) })
				if took := time.Since(began); !errors.Is(err, tc.err) || out.String() != tc.answer+"\n" || took != tc.took {
					t.Errorf("after %v: %s, %v; want after %v: %s, %v", took, &out, err, tc.took, tc.answer, tc.err)
				}
			})
		})
	}
}
