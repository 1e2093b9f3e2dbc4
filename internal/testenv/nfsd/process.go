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

// patience is the maximum time to wait for the kernel or for a killed process.
const patience = 20 * time.Second

// startNamespaces starts a script in new namespaces, which the command start creates, and returns its process after
// the script has printed "ready". args are the arguments of the script. When the test ends, all processes in the
// script's mount namespace are killed.
func startNamespaces(tb testing.TB, start []string, script string, args ...string) (pid int) {
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
		output, _ := os.ReadFile(log.Name())
		tb.Fatalf("setting up the namespaces failed: the script printed %q\n%s", line, output)
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
	// tb.Context ends before the clean-up functions run.
	err = retry.For(context.Background(), patience, func() (bool, error) {
		pids := processesIn(namespace)
		for _, p := range pids {
			_ = syscall.Kill(p, syscall.SIGKILL)
		}
		return len(pids) > 0, fmt.Errorf("processes %v do not end", pids)
	})
	if err != nil && len(processesIn(namespace)) > 0 {
		tb.Error(err)
	}
}

// processesIn returns the processes in a mount namespace. Zombies are in no namespace.
func processesIn(namespace string) []int {
	var pids []int
	links, _ := filepath.Glob("/proc/[0-9]*/ns/mnt")
	for _, l := range links {
		// A process that ended after the glob has no link.
		if at, err := os.Readlink(l); err == nil && at == namespace {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(filepath.Dir(l))))
			pids = append(pids, pid)
		}
	}
	return pids
}

// enter returns the beginning of a command line that runs a program in the namespaces of a process.
func enter(pid int, namespaces ...string) []string {
	command := []string{"nsenter", "--target", strconv.Itoa(pid)}
	for _, n := range namespaces {
		command = append(command, "--"+n)
	}
	return append(command, "--")
}
