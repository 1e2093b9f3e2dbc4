package nfsd

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/internal/retry"
)

// patience bounds the wait for the kernel or a killed process.
const patience = 20 * time.Second

// hold starts a script in new namespaces and returns its process after it has printed "ready". When the test
// ends, all processes in its mount namespace are killed.
func hold(tb testing.TB, start []string, script string, args ...string) (pid int) {
	tb.Helper()
	command := slices.Concat(start, []string{"bash", "-euxc", script, "bash"}, args)
	cmd := exec.Command(command[0], command[1:]...)
	log, err := os.CreateTemp(tb.TempDir(), "log")
	if err != nil {
		tb.Fatal(err)
	}
	defer log.Close()
	cmd.Stderr = log
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = cmd.Wait() })
	tb.Cleanup(func() { endAll(tb, cmd.Process.Pid) })
	if line, _ := bufio.NewReader(stdout).ReadString('\n'); line != "ready\n" {
		said, _ := os.ReadFile(log.Name())
		tb.Fatalf("the namespaces were not set up: %s\n%s", line, said)
	}
	return cmd.Process.Pid
}

// endAll kills all processes in the mount namespace of pid and waits for their end.
func endAll(tb testing.TB, pid int) {
	tb.Helper()
	namespace, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid))
	if err != nil {
		return // the process has ended
	}
	// The context of the test ends before its clean-up.
	err = retry.For(context.Background(), patience, func() (bool, error) {
		members := within(namespace)
		for _, p := range members {
			_ = syscall.Kill(p, syscall.SIGKILL)
		}
		return len(members) > 0, fmt.Errorf("processes %v do not end", members)
	})
	if err != nil && len(within(namespace)) > 0 {
		tb.Error(err)
	}
}

// within returns the processes in a mount namespace. A zombie is in none.
func within(namespace string) []int {
	var members []int
	links, _ := filepath.Glob("/proc/[0-9]*/ns/mnt")
	for _, l := range links {
		// A process that ended after the glob has no link.
		if at, err := os.Readlink(l); err == nil && at == namespace {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(l))))
			members = append(members, pid)
		}
	}
	return members
}

// enter returns the first words of a command in the namespaces of a process.
func enter(pid int, namespaces ...string) []string {
	command := []string{"nsenter", "--target", strconv.Itoa(pid)}
	for _, n := range namespaces {
		command = append(command, "--"+n)
	}
	return append(command, "--")
}
