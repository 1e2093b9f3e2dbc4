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
	// maxAnswer is the maximum length of a driver's output, and maxQuoted that of a quote in an
	// error, in bytes.
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
	NewSize      int64        `json:"volumeNewSize"` // in bytes
	Capabilities capabilities `json:"capabilities"`
}

// capabilities are the capabilities that change the plugin's behavior. A capability that is missing in
// the answer is true.
type capabilities struct {
	Attach           bool `json:"attach"`
	FSGroup          bool `json:"fsGroup"`
	RequiresFSResize bool `json:"requiresFSResize"`
}

// errNotSupported is returned if the driver's status is "Not supported". The caller then performs the
// default action itself.
var errNotSupported = errors.New("the driver does not support the call")

// secrets are values that no error may contain, even if a driver prints them.
type secrets []string

// quote returns a text in quotes. It hides secrets and cuts the text after maxQuoted bytes.
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

// call runs the driver's executable. args are the name of the call and its arguments. Errors do not contain
// the values in hidden. An error is a *plugins.UncertainError, unless the driver reported the failure or
// could not be started.
func (d *driver) call(ctx context.Context, hidden secrets, args ...string) (answer, error) {
	ctx, cancel := context.WithTimeout(ctx, d.callTime)
	defer cancel()
	out, processErr := command.Command{Name: d.executable(), Args: args}.Answer(ctx, maxAnswer)
	a, err := d.result(out, processErr, hidden)
	if err != nil && !errors.Is(err, errNotSupported) {
		err = fmt.Errorf("driver %s: %s: %w", d.name, args[0], err)
	}
	return a, err
}

// result returns the result of a call from the output of the driver's process and the error with which
// the process ended.
func (d *driver) result(out string, processErr error, hidden secrets) (answer, error) {
	var exit *command.Error
	switch {
	case errors.Is(processErr, command.ErrMissing):
		return answer{}, fmt.Errorf("not installed: put its executable at %s", d.executable())
	case errors.Is(processErr, context.DeadlineExceeded):
		return answer{}, uncertainf("no answer within %v, so the driver was killed: check what it waits for", d.callTime)
	case processErr != nil && !errors.As(processErr, &exit):
		return answer{}, &plugins.UncertainError{Err: processErr}
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
