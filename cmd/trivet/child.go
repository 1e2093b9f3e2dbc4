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

	"github.com/trivet-csi/trivet/internal/reexec"
)

// taskRole is that of a child that does one task on an export. If the server does not answer
// the child hangs, and is killed.
const taskRole = "export-task"

// A task reads its input, and tells what it finds as it finds it.
type task func(ctx context.Context, input []byte, tell func(any) error) error

var tasks = map[string]task{
	examineTask: examine,
	listTask:    listExport,
	initTask:    initExport,
}

// order is what a child is told.
type order struct {
	Task  string
	Input json.RawMessage
}

// line is what the child writes, one a line: a finding, or what it failed with.
type line struct {
	Found json.RawMessage `json:"found,omitempty"`
	Error string          `json:"error,omitempty"`
}

// runTask is the child.
func runTask(in reexec.Input) error {
	var o order
	if err := in.Decode(&o); err != nil {
		return err
	}
	do := tasks[o.Task]
	if do == nil {
		return fmt.Errorf("unknown task %q", o.Task)
	}
	out := json.NewEncoder(in.Conn)
	err := do(context.Background(), o.Input, func(found any) error {
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

// inChild has a child do a task, and passes on what it finds. The child is killed when ctx
// ends, and not waited for then.
func inChild[T any](ctx context.Context, name string, input any, found func(T)) error {
	in, err := json.Marshal(input)
	if err != nil {
		return err
	}
	started := time.Now()
	child, err := reexec.Child{Program: reexec.Self, Role: taskRole, Label: []string{name}, Args: order{name, in}, Quiet: true}.Start()
	if err != nil {
		return err
	}
	defer child.Conn.Close() //nolint:errcheck // nothing more is sent
	defer child.Kill()
	if deadline, ok := ctx.Deadline(); ok {
		if err := child.Conn.SetReadDeadline(deadline); err != nil {
			return err
		}
	}
	if err = readLines(child.Conn, found); err == nil {
		select {
		case <-child.Done():
			err = child.Err()
		case <-ctx.Done():
		}
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
