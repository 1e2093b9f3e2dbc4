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
	// callTime limits one call.
	callTime = 2 * time.Minute
	// maxAnswer limits the output of a driver, and maxQuoted the part of it in an error, in
	// bytes.
	maxAnswer = 1 << 20
	maxQuoted = 256
)

// The values of status in an answer.
const (
	success      = "Success"
	failure      = "Failure"
	notSupported = "Not supported"
)

// answer is the output of a driver.
type answer struct {
	Status       string       `json:"status"`
	Message      string       `json:"message"`
	Device       string       `json:"device"`
	Attached     bool         `json:"attached"`
	NewSize      int64        `json:"volumeNewSize"`
	Capabilities capabilities `json:"capabilities"`
}

// capabilities are the capabilities that change the plugin's behaviour. Those missing in the answer
// are true.
type capabilities struct {
	Attach           bool `json:"attach"`
	FSGroup          bool `json:"fsGroup"`
	RequiresFSResize bool `json:"requiresFSResize"`
}

// errNotSupported means that the plugin performs the default action itself.
var errNotSupported = errors.New("the driver does not support the call")

// secrets are values that no error may contain, even if a driver prints them.
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

// call runs the driver's executable. An error is an *plugins.UncertainError, unless the driver
// reported the failure or could not be started.
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

// judge returns the result of a call from the driver's output and the error of its process.
func (d *driver) judge(out string, ended error, hidden secrets) (answer, error) {
	var exit *command.Error
	switch {
	case errors.Is(ended, command.ErrMissing):
		return answer{}, fmt.Errorf("not installed: put its executable at %s", d.executable())
	case errors.Is(ended, context.DeadlineExceeded):
		return answer{}, uncertainf("no answer within %v, so it was killed: check what it waits for", d.callTime)
	case ended != nil && !errors.As(ended, &exit):
		return answer{}, &plugins.UncertainError{Err: ended}
	}
	a := answer{Capabilities: capabilities{true, true, true}}
	if err := json.Unmarshal([]byte(out), &a); err != nil {
		return a, uncertainf("it printed %s%s, which is no answer (%w): fix the driver", hidden.quote(out), ending(exit, hidden), err)
	}
	switch {
	case a.Status == notSupported:
		return a, errNotSupported
	case a.Status == failure:
		return a, fmt.Errorf("it failed: %s", hidden.quote(a.Message))
	case a.Status != success:
		return a, uncertainf("it answered with status %s: want %s, %s or %s: fix the driver", hidden.quote(a.Status), success, failure, notSupported)
	case exit != nil:
		return a, uncertainf("it answered %s%s: fix the driver", success, ending(exit, hidden))
	}
	return a, nil
}

// ending describes how a driver's process failed. It omits the command line, which may contain
// secrets.
func ending(exit *command.Error, hidden secrets) string {
	switch {
	case exit == nil:
		return ""
	case exit.Signal != 0:
		return fmt.Sprintf(" and was ended by %v, with output %s", exit.Signal, hidden.quote(exit.Output))
	}
	return fmt.Sprintf(" and ended with status %d, with output %s", exit.Code, hidden.quote(exit.Output))
}

func uncertainf(format string, args ...any) error {
	return &plugins.UncertainError{Err: fmt.Errorf(format, args...)}
}
