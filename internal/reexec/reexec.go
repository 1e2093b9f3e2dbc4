// Package reexec starts this program again as a child process with a role, for example as the worker of an NFS
// export. A child that hangs or dies does not affect this process. Parent and child share a connection, which
// ends when either process ends. The parent first sends the arguments as JSON, preceded by their length in four
// bytes (big endian). The role defines the rest of the protocol.
package reexec

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/command"
)

// Self is the program of this process, even if its file has been replaced.
const Self = "/proc/self/exe"

// Child describes a child to start.
type Child struct {
	Program string // Self, or another program that calls Run
	Role    string
	Label   []string // arguments that the child ignores; ps(1) shows them
	Args    any
	Files   []*os.File // the child inherits duplicates; the caller must still close the files
	// Detached means that the child continues when this process ends. Otherwise the kernel then kills the child.
	Detached bool
	// Quiet means that the child's output does not go to the standard error of this process. The child's error
	// contains the end of the output in any case.
	Quiet bool
}

// Process is a started child.
type Process struct {
	*command.Child
	Conn *net.UnixConn
}

// maxHeader is the maximum size of a header in bytes. It limits the memory that a child allocates for the header.
const maxHeader = 16 << 20

// header is the first data that the parent sends.
type header struct {
	Args  json.RawMessage
	Files []string // the names of Child.Files
}

// Start starts the child and sends the arguments to the child.
func (c Child) Start() (*Process, error) {
	h := header{Files: make([]string, len(c.Files))}
	for i, f := range c.Files {
		h.Files[i] = f.Name()
	}
	var err error
	if h.Args, err = json.Marshal(c.Args); err != nil {
		return nil, err
	}
	text, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	if len(text) > maxHeader {
		return nil, fmt.Errorf("%s %s: the arguments have %d bytes, which exceeds the maximum of %d", c.Program, c.Role, len(text), maxHeader)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	run := command.Command{Name: c.Program, Args: append([]string{c.Role}, c.Label...), Hold: append([]*os.File{theirs}, c.Files...), Quiet: c.Quiet}
	start := func() (*command.Child, error) { return run.Start(nil) }
	if c.Detached {
		start = run.StartDetached
	}
	child, err := start()
	theirs.Close() // otherwise the write below would not fail if the child has ended
	if err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	if _, err := ours.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...)); err != nil {
		child.Kill()
		return nil, errors.Join(fmt.Errorf("%s %s: %w", c.Program, c.Role, err), ours.Close())
	}
	return &Process{child, ours}, nil
}

// connection is the descriptor of the connection in the child. The descriptors of Files follow.
const connection = 3

// Input is the data that a child receives from its parent.
type Input struct {
	args  json.RawMessage
	Conn  *net.UnixConn
	Files []*os.File
}

// Decode decodes the arguments.
func (in Input) Decode(args any) error { return json.Unmarshal(in.args, args) }

// Role is the function that runs in a child. The child ends when the function returns.
type Role func(Input) error

// Run runs the role that arguments[1] names; arguments[0] is the program. isChild is false if arguments[1] is
// missing or names no role.
func Run(arguments []string, roles map[string]Role) (isChild bool, err error) {
	if len(arguments) < 2 || roles[arguments[1]] == nil {
		return false, nil
	}
	in, err := read()
	if err != nil {
		return true, fmt.Errorf("%s is for this program's own use: %w", arguments[1], err)
	}
	defer in.Conn.Close() //nolint:errcheck // the process ends
	return true, roles[arguments[1]](in)
}

// read receives the data that the parent sends.
func read() (in Input, err error) {
	if in.Conn, err = connOf(connection); err != nil {
		return in, err
	}
	var size [4]byte
	if _, err := io.ReadFull(in.Conn, size[:]); err != nil {
		return in, err
	}
	length := binary.BigEndian.Uint32(size[:])
	if length > maxHeader {
		return in, fmt.Errorf("the parent announced a header of %d bytes, which exceeds the maximum of %d", length, maxHeader)
	}
	text := make([]byte, length)
	if _, err := io.ReadFull(in.Conn, text); err != nil {
		return in, err
	}
	var h header
	if err := json.Unmarshal(text, &h); err != nil {
		return in, err
	}
	in.args = h.Args
	for i, name := range h.Files {
		in.Files = append(in.Files, os.NewFile(uintptr(connection+1+i), name))
	}
	return in, nil
}

// socketPair returns the parent's side and the file that the child inherits.
func socketPair() (ours *net.UnixConn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	theirs = os.NewFile(uintptr(fds[1]), "parent")
	if ours, err = connOf(fds[0]); err != nil {
		theirs.Close()
	}
	return ours, theirs, err
}

// connOf returns a connection for a descriptor and closes the descriptor.
func connOf(fd int) (*net.UnixConn, error) {
	file := os.NewFile(uintptr(fd), "child")
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("descriptor %d: %w", fd, unix.ENOTSOCK), conn.Close())
	}
	return unixConn, nil
}
