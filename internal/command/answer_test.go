package command_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/command"
)

func sh(script string) command.Command {
	return command.Command{Name: "sh", Args: []string{"-c", script}}
}

// TestAnswer: Answer returns the standard output of a program up to the limit, whether or not the program fails.
func TestAnswer(t *testing.T) {
	for _, tc := range []struct {
		name, script, answer, err string
		code                      int
	}{
		{"success", "echo yes; echo noise >&2", "yes\n", "", 0},
		{"failure", "echo no; echo why >&2; exit 3", "no\n", "why", 3},
		{"too much", "yes", strings.Repeat("y\n", 50), "more than 100 bytes", 0},
		{"remaining child", "echo yes; sleep 1000 & echo $! >" + filepath.Join(t.TempDir(), "pid"), "yes\n", "", 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			answer, err := sh(tc.script).Answer(t.Context(), 100)
			if answer != tc.answer || (err == nil) != (tc.err == "") || err != nil && !strings.Contains(err.Error(), tc.err) {
				t.Errorf("got answer %q, %v, want %q, %q", answer, err, tc.answer, tc.err)
			}
			var exit *command.Error
			if errors.As(err, &exit) && exit.Code != tc.code {
				t.Errorf("got exit status %d, want %d", exit.Code, tc.code)
			}
			if _, file, ok := strings.Cut(tc.script, "$! >"); ok {
				end(t, file)
			}
		})
	}
	if _, err := (command.Command{Name: "/nowhere/program"}).Answer(t.Context(), 1); !errors.Is(err, command.ErrMissing) {
		t.Errorf("missing program: got %v, want ErrMissing", err)
	}
}

// end kills the process whose PID a file contains. It fails the test if the process does not run.
func end(t *testing.T, file string) {
	t.Helper()
	pid := readPID(t, file)
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("process %d does not run any more: %v", pid, err)
	}
}

// readPID reads a PID from a file.
func readPID(t *testing.T, file string) int {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// TestAnswerCanceled: when the context ends, the program and the processes that it started are killed.
func TestAnswerCanceled(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pid")
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		defer cancel()
		for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if b, err := os.ReadFile(file); err == nil && strings.HasSuffix(string(b), "\n") {
				return
			}
		}
	}()
	answer, err := sh("echo part; sleep 1000 & echo $! >"+file+"; wait").Answer(ctx, 100)
	if answer != "part\n" || !errors.Is(err, context.Canceled) {
		t.Errorf("got answer %q, %v, want \"part\\n\", context.Canceled", answer, err)
	}
	awaitEnd(t, readPID(t, file))
}
