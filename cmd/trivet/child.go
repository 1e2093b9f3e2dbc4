package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/trivet-csi/trivet/internal/command"
)

// childCommand is this program as a child of itself: it does one task on an export.
// What a dead server does not let go of hangs there, and the child is killed.
const childCommand = "export-task"

// A task reads its input, and tells what it finds as it finds it.
type task func(ctx context.Context, input []byte, tell func(any) error) error

var tasks = map[string]task{
	examineTask: examine,
	listTask:    listExport,
	initTask:    initExport,
}

// line is what the child writes, one a line: a finding, or what it failed with.
type line struct {
	Found json.RawMessage `json:"found,omitempty"`
	Error string          `json:"error,omitempty"`
}

// answers is the descriptor that a child writes its lines to.
const answers = 3

// runTask is the child: the task's name, its input.
func runTask(args []string) error {
	if len(args) != 2 || tasks[args[0]] == nil {
		return errors.New("it is for this program's own use")
	}
	out := json.NewEncoder(os.NewFile(answers, "answers"))
	err := tasks[args[0]](context.Background(), []byte(args[1]), func(found any) error {
		b, err := json.Marshal(found)
		if err != nil {
			return err
		}
		return out.Encode(line{Found: b})
	})
	if err != nil {
		return out.Encode(line{Error: err.Error()})
	}
	return nil
}

// inChild has a task done, and hands on what it finds. The child is killed when ctx
// ends, and is not waited for then.
func inChild[T any](ctx context.Context, name string, input any, found func(T)) error {
	in, err := json.Marshal(input)
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := r.SetReadDeadline(deadline); err != nil {
			return err
		}
	}
	started, ended := time.Now(), make(chan error, 1)
	go func() {
		child := command.Command{Name: "/proc/self/exe", Args: []string{childCommand, name, string(in)}, Hold: []*os.File{w}}
		err := child.Run(ctx)
		w.Close() // the end of what there is to read
		ended <- err
	}()
	if err = readLines(r, found); err == nil {
		err = <-ended
	}
	if ctx.Err() != nil || errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("gave no answer in %v", time.Since(started).Round(time.Second))
	}
	return err
}

// readLines hands on what a child found; the error is the child's.
func readLines[T any](r io.Reader, found func(T)) error {
	lines := bufio.NewReader(r)
	for {
		b, err := lines.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		var l line
		if err := json.Unmarshal(b, &l); err != nil {
			return err
		}
		if l.Error != "" {
			return errors.New(l.Error)
		}
		var one T
		if err := json.Unmarshal(l.Found, &one); err != nil {
			return err
		}
		found(one)
	}
}
