package flexvolume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/trivet-csi/trivet/internal/command"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
)

const (
	// callTime is how long a driver may take for one call.
	callTime = 2 * time.Minute
	// maxAnswer is how much of what a driver prints is read, in bytes, and maxQuoted how
	// much of it an error has.
	maxAnswer = 1 << 20
	maxQuoted = 256
)

// What a driver's answer has for status.
const (
	success      = "Success"
	failure      = "Failure"
	notSupported = "Not supported"
)

// answer is what a driver prints.
type answer struct {
	Status       string       `json:"status"`
	Message      string       `json:"message"`
	Device       string       `json:"device"`
	Attached     bool         `json:"attached"`
	NewSize      int64        `json:"volumeNewSize"`
	Capabilities capabilities `json:"capabilities"`
}

// capabilities are those that change what is done here; what a driver does not say is
// true.
type capabilities struct {
	Attach           bool `json:"attach"`
	FSGroup          bool `json:"fsGroup"`
	RequiresFSResize bool `json:"requiresFSResize"`
}

// errNotSupported means: what is usual is to be done without the driver.
var errNotSupported = errors.New("the driver does not support the call")

// secrets are not for errors, whatever a driver prints.
type secrets []string

func (s secrets) quote(text string) string {
	for _, secret := range s {
		if secret = strings.TrimSpace(secret); secret != "" {
			text = strings.ReplaceAll(text, secret, "***")
		}
	}
	if len(text) > maxQuoted {
		text = text[:maxQuoted] + "…"
	}
	return fmt.Sprintf("%q", text)
}

// call runs the driver's executable. An error is an *plugins.UncertainError unless the
// driver says itself that it failed, or does not run at all.
func (d *driver) call(ctx context.Context, hidden secrets, words ...string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, d.callTime)
	defer cancel()
	out, ended := command.Command{Name: d.executable(), Args: words}.Answer(ctx, maxAnswer)
	a, err := d.judge(out, ended, hidden)
	if err != nil && !errors.Is(err, errNotSupported) {
		err = fmt.Errorf("driver %s: %s: %w", d.name, words[0], err)
	}
	return a, err
}

// judge tells what became of a call: out is what the driver printed, ended how it did.
func (d *driver) judge(out string, ended error, hidden secrets) (answer, error) {
	var exit *command.Error
	switch {
	case errors.Is(ended, command.ErrMissing):
		return answer{}, fmt.Errorf("it is not installed: put its executable at %s", d.executable())
	case errors.Is(ended, context.DeadlineExceeded):
		return answer{}, uncertainf("it gave no answer in %v, and was ended: look at what it waits for", d.callTime)
	case ended != nil && !errors.As(ended, &exit):
		return answer{}, &plugins.UncertainError{Err: ended}
	}
	a := answer{Capabilities: capabilities{true, true, true}}
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		return a, uncertainf("it printed %s%s, which is no answer (%w): mend the driver", hidden.quote(out), ending(exit, hidden), err)
	}
	switch {
	case a.Status == notSupported:
		return a, errNotSupported
	case a.Status == failure:
		return a, fmt.Errorf("it failed: %s", hidden.quote(a.Message))
	case a.Status != success:
		return a, uncertainf("it answered with status %s: want %s, %s or %s: mend the driver", hidden.quote(a.Status), success, failure, notSupported)
	case exit != nil:
		return a, uncertainf("it answered %s%s: mend the driver", success, ending(exit, hidden))
	}
	return a, nil
}

// ending is how a driver ended that did not end well. Its command line is left out, which
// may have secrets.
func ending(exit *command.Error, hidden secrets) string {
	switch {
	case exit == nil:
		return ""
	case exit.Signal != 0:
		return fmt.Sprintf(" and was ended by %v, saying %s", exit.Signal, hidden.quote(exit.Output))
	}
	return fmt.Sprintf(" and ended with status %d, saying %s", exit.Code, hidden.quote(exit.Output))
}

func uncertainf(format string, args ...any) error {
	return &plugins.UncertainError{Err: fmt.Errorf(format, args...)}
}
