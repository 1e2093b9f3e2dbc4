// Package logging configures the log of a process. All packages log through klog.
package logging

import (
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strconv"
	"strings"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"
)

// The formats of the log.
const (
	// Text has klog's format.
	Text = "text"
	// JSON has one object per line, with the keys ts, level, msg and those of the message.
	JSON = "json"
)

// Formats are all formats; the first is the default.
var Formats = []string{Text, JSON}

// Options are the settings of the log.
type Options struct {
	// Level is the verbosity. 0 logs only what an administrator must know, 4 also logs requests and responses.
	Level int
	// Format is one of Formats; empty: Text.
	Format string
}

// Apply configures klog, which writes to standard error.
func (o Options) Apply() error {
	flags := flag.NewFlagSet("klog", flag.ContinueOnError)
	klog.InitFlags(flags)
	if err := flags.Set("v", strconv.Itoa(o.Level)); err != nil {
		return err
	}
	switch o.Format {
	case "", Text:
		return nil
	case JSON:
		klog.SetLoggerWithOptions(newJSONLogger(os.Stderr, o.Level), klog.ContextualLogger(true))
		return nil
	}
	return fmt.Errorf("log format %q: must be one of %s", o.Format, strings.Join(Formats, ", "))
}

// newJSONLogger returns a logger that writes one JSON object per line for each message of at most a verbosity.
func newJSONLogger(w io.Writer, verbosity int) logr.Logger {
	// logr passes a message of verbosity V to slog with the level -V.
	options := &slog.HandlerOptions{Level: slog.Level(-verbosity), ReplaceAttr: replaceAttr}
	return logr.FromSlogHandler(slog.NewJSONHandler(w, options))
}

// replaceAttr names the time ts, reduces the levels to info and error, and formats durations and other values
// that have a text as that text, as klog does.
func replaceAttr(groups []string, a slog.Attr) slog.Attr {
	if len(groups) == 0 {
		switch a.Key {
		case slog.TimeKey:
			return slog.Attr{Key: "ts", Value: a.Value}
		case slog.LevelKey:
			return slog.String(slog.LevelKey, levelName(a.Value))
		}
	}
	if a.Value.Kind() == slog.KindDuration {
		return slog.String(a.Key, a.Value.Duration().String())
	}
	if text, ok := a.Value.Any().(fmt.Stringer); ok && a.Value.Kind() == slog.KindAny {
		return slog.String(a.Key, text.String())
	}
	return a
}

func levelName(v slog.Value) string {
	if level, ok := v.Any().(slog.Level); ok && level >= slog.LevelError {
		return "error"
	}
	return "info"
}
