package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/pool"
)

// flexvolumeTime limits a call. A kubelet sets no limit; the volume manager waits two
// minutes.
const flexvolumeTime = 110 * time.Second

// The configuration of a FlexVolume executable is $TRIVET_FLEXVOLUME_CONFIG if that is set,
// otherwise the first existing file of flexvolumeConfigName in the executable's own directory,
// flexvolumeConfig, and the driver's configuration.
const (
	flexvolumeConfigName = "config.yaml"
	flexvolumeConfig     = "/etc/trivet/flexvolume.yaml"
	flexvolumeStateDir   = "/var/lib/trivet/flexvolume"

	flexvolumeConfigVariable   = "TRIVET_FLEXVOLUME_CONFIG"
	flexvolumeEndpointVariable = "TRIVET_FLEXVOLUME_ENDPOINT"
)

// flexvolumeDir returns the directory of the program if the directory is named <vendor>~<driver>, as that of
// a kubelet's FlexVolume driver. Otherwise it returns an empty string.
func flexvolumeDir(program string) string {
	dir := filepath.Dir(program)
	vendor, name, ok := strings.Cut(filepath.Base(dir), "~")
	if !ok || vendor == "" || name == "" {
		return ""
	}
	return dir
}

func newFlexvolumeCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "flexvolume CALL [ARGUMENT]...",
		GroupID: serviceGroup,
		Short:   "Answer one call of a kubelet, as a FlexVolume driver",
		Long: `Answers one call of a kubelet, or of trivet volume-manager, with one line of JSON, as a
FlexVolume driver: init, mount, unmount, expandvolume, expandfs. To install it, link
this program as <vendor>~<driver>/<driver> in the kubelet's volume plugin directory.
For trivet~nfs, trivet~loop and trivet~local the name determines the backend, for all
others the option backend.

The running driver serves a call if it has the volume's pool. Otherwise, and for
directories of NFS servers, the call starts a driver, which ends when it is idle.

assign NAMESPACE OPTIONS is for administrators: it gives a volume that is not mounted
to a namespace. Only pods of that namespace can mount the volume.

The exit status is 1 if the answer is not Success.`,
		Example: `  # Install the program as the FlexVolume driver trivet/loop.
  mkdir -p /usr/libexec/kubernetes/kubelet-plugins/volume/exec/trivet~loop
  ln -s /usr/local/bin/trivet /usr/libexec/kubernetes/kubelet-plugins/volume/exec/trivet~loop/loop

  # Give a volume to a namespace.
  trivet flexvolume assign team-b '{"backend": "loop", "pool": "flex", "volume": "data"}'`,
		DisableFlagParsing:    true,
		DisableFlagsInUseLine: true,
		Args:                  cobra.ArbitraryArgs,
		ValidArgs:             []string{"init", "mount", "unmount", "expandvolume", "expandfs", "assign"},
	}
	cmd.RunE = func(_ *cobra.Command, words []string) error {
		if isHelp(words) {
			return cmd.Help()
		}
		return runFlexvolume("", words)
	}
	return cmd
}

// isHelp reports whether the words of a call request help.
func isHelp(words []string) bool {
	return len(words) > 0 && slices.Contains([]string{"help", "--help", "-h"}, words[0])
}

// runLinked runs the program as the FlexVolume driver in dir.
func runLinked(dir string, words []string) error {
	if isHelp(words) {
		_, err := newRootCommand().execute([]string{"help", "flexvolume"})
		return err
	}
	return runFlexvolume(dir, words)
}

// runFlexvolume answers one call in one line. The name of dir, the directory of the executable, may determine
// the backend. If it does not, or if dir is empty, the options of the call determine the backend.
func runFlexvolume(dir string, words []string) error {
	discardMixedLog()
	return answerInTime(os.Stdout, func(ctx context.Context) flexvolume.Answer { return answerFlexvolume(ctx, dir, words) })
}

// answerInTime writes the answer of a call. It does not wait for a call that ignores its
// context: a thread that hangs in the kernel ends with the process.
func answerInTime(out io.Writer, call func(context.Context) flexvolume.Answer) error {
	ctx, cancel := context.WithTimeout(context.Background(), flexvolumeTime)
	defer cancel()
	answered := make(chan flexvolume.Answer, 1)
	go func() { answered <- call(ctx) }()
	var a flexvolume.Answer
	select {
	case a = <-answered:
	case <-time.After(flexvolumeTime + 5*time.Second):
		a = flexvolume.Answer{Status: flexvolume.Failure, Message: fmt.Sprintf("timed out after %v: the storage of the volume does not answer; the kubelet retries", flexvolumeTime)}
	}
	if err := json.NewEncoder(out).Encode(a); err != nil {
		return err
	}
	if a.Status != flexvolume.Success {
		return errAnswered
	}
	return nil
}

// errAnswered ends the process with status 1. The answer contains the reason.
var errAnswered = errors.New("the call failed")

// discardMixedLog discards the log if standard output and standard error are the same file, as in a call of a
// kubelet, because the log would mix with the answer.
func discardMixedLog() {
	out, err := os.Stdout.Stat()
	if err != nil {
		return
	}
	log, err := os.Stderr.Stat()
	if err != nil || !os.SameFile(out, log) {
		return
	}
	if null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0); err == nil {
		os.Stderr = null
	}
}

func answerFlexvolume(ctx context.Context, dir string, words []string) flexvolume.Answer {
	e, err := flexvolumeExecutable(dir)
	if err != nil {
		return flexvolume.Answer{Status: flexvolume.Failure, Message: err.Error()}
	}
	return e.Answer(ctx, words)
}

func flexvolumeExecutable(dir string) (*flexvolume.Executable, error) {
	stateDir, err := filepath.Abs(cmp.Or(os.Getenv(flexvolume.StateDirVariable), flexvolumeStateDir))
	if err != nil {
		return nil, err
	}
	e := &flexvolume.Executable{StateDir: stateDir, DefaultKind: kinds[0].Name}
	if i := slices.IndexFunc(kinds, backend.Kind.OnlyOnExports); i >= 0 {
		e.ServerKind = kinds[i].Name
	}
	_, name, _ := strings.Cut(filepath.Base(dir), "~")
	if slices.Contains(kinds.Names(), name) {
		e.Kind = name
	}
	path, err := filepath.Abs(flexvolumeConfigPath(dir)) // the on-demand driver has another working directory
	if err != nil {
		return nil, err
	}
	config, err := loadFlexvolumeConfig(path, e.StateDir)
	if err != nil {
		return nil, err
	}
	endpoint := cmp.Or(os.Getenv(flexvolumeEndpointVariable), config.FlexVolume.Endpoint, defaultEndpoint)
	if e.Socket, err = driver.SocketPath(endpoint); err != nil {
		return nil, err
	}
	e.OnDemand, err = onDemandDriver(path, e.StateDir, endpoint, config.Pools)
	return e, err
}

// loadFlexvolumeConfig loads a configuration without its nfs pools, because FlexVolume mounts an NFS directory
// without a pool.
func loadFlexvolumeConfig(path, stateDir string) (driver.Config, error) {
	config, err := loadConfig(path, stateDir)
	config.Pools = slices.DeleteFunc(config.Pools, pool.Config.Shared)
	return config, err
}

// flexvolumeConfigPath returns the path of the configuration of the executable in dir.
func flexvolumeConfigPath(dir string) string {
	if path := os.Getenv(flexvolumeConfigVariable); path != "" {
		return path
	}
	paths := []string{flexvolumeConfig}
	if dir != "" {
		paths = slices.Insert(paths, 0, filepath.Join(dir, flexvolumeConfigName))
	}
	for _, path := range paths {
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			return path
		}
	}
	return defaultConfig
}
