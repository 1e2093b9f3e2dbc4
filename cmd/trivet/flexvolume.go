package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/reexec"
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

const flexvolumeUsage = `usage: trivet flexvolume CALL [ARGUMENT]...

Answers one call of a kubelet, or of trivet volume-manager, in one line of JSON, as a
FlexVolume driver: init, mount, unmount, expandvolume, expandfs. To install it, link this
program as <vendor>~<driver>/<driver> in the kubelet's volume plugin directory. For
trivet~nfs, trivet~loop and trivet~local the name determines the backend, for all others
the option backend.

The running driver serves a call if it has the volume's pool. Otherwise, and for
directories of NFS servers, the call starts a driver that serves it and that ends when
idle.

assign NAMESPACE OPTIONS is for administrators: it gives a volume that is not mounted to
a namespace. Only pods of that namespace can mount the volume.
`

// runFlexvolume answers one call in one line. The name of dir, the directory of the executable, may determine
// the backend. If it does not, or if dir is empty, the options of the call determine the backend.
func runFlexvolume(dir string, words []string) error {
	if isHelp(words) {
		fmt.Print(flexvolumeUsage)
		return errHelp
	}
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

const (
	// onDemandCommand is the command of the driver that a FlexVolume call starts. The usage does not
	// contain it.
	onDemandCommand = "flexvolume-driver"
	// onDemandIdle is how long the on-demand driver runs without a connection before it ends.
	onDemandIdle = 3 * time.Second
	// onDemandLog is the size of the log in bytes above which a starting on-demand driver truncates it.
	onDemandLog = 1 << 20
	// onDemandDir is the path of the state directory, which the on-demand driver inherits as file
	// descriptor 3. It keeps the path of the socket short, even if the path of the directory is long.
	onDemandDir   = "/proc/self/fd/3"
	onDemandDirFD = 3
)

// onDemandDriver describes the on-demand driver for a configuration. Executables with equal
// configurations share it.
func onDemandDriver(config, stateDir, endpoint string, pools []pool.Config) (d flexvolume.OnDemand, err error) {
	b, err := json.Marshal([]any{endpoint, pools})
	if err != nil {
		return d, err
	}
	sum := sha256.Sum256(b)
	d.Socket = "driver-" + hex.EncodeToString(sum[:8]) + ".sock"
	d.Command = []string{reexec.Self, onDemandCommand, "--config", config, "--state-dir", stateDir, "--endpoint", endpoint, "--socket", d.Socket}
	d.Pools = driver.PoolNames(pools)
	return d, nil
}

// runOnDemandDriver serves CSI for those pools of the configuration that the driver at the endpoint does
// not serve. It ends when it is idle, or when the driver at the endpoint serves other ones of these pools.
func runOnDemandDriver(args []string) error {
	flags := flag.NewFlagSet("trivet "+onDemandCommand, flag.ContinueOnError)
	path, stateDir, endpoint := configFlag(flags), stateDirFlag(flags), endpointFlag(flags)
	socket := flags.String("socket", "", "`name` of the socket of this driver in the state directory")
	if err := parse(flags, args); err != nil {
		return err
	}
	if *socket == "" {
		return errors.New("this command is for this program's own use")
	}
	syscall.CloseOnExec(onDemandDirFD) // programs that the driver runs do not need the state directory
	lock, err := lockOnDemand(*stateDir, *socket)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Close()
	if err := logOnDemand(*stateDir); err != nil {
		return err
	}
	config, err := loadFlexvolumeConfig(*path, *stateDir)
	if err != nil {
		return err
	}
	running, err := driver.SocketPath(*endpoint)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	names := driver.PoolNames(config.Pools)
	served, err := flexvolume.PoolsServed(ctx, running, names)
	if err != nil { // calls without a pool can still be served
		klog.FromContext(ctx).Error(err, "Failed to query the pools of the running driver")
	}
	config.Pools = slices.DeleteFunc(config.Pools, func(p pool.Config) bool { return slices.Contains(served, p.Name) })
	o := driver.Options{
		Version: version, Kinds: kinds, Name: driver.DefaultName, NodeID: "flexvolume", StateDir: *stateDir,
		Endpoint: "unix://" + filepath.Join(onDemandDir, *socket), Services: []string{"controller", "node"},
		Config:   driver.Config{Pools: config.Pools, MaxVolumesPerNode: config.MaxVolumesPerNode},
		Worker:   reexec.Self,
		IdleTime: onDemandIdle,
	}
	defer klog.Flush()
	go func() {
		defer stop()
		flexvolume.AwaitChange(ctx, running, names, served)
	}()
	return driver.Run(ctx, o)
}

// lockOnDemand acquires the lock of an on-demand driver until the process ends. It returns nil if another
// process holds the lock.
func lockOnDemand(stateDir, socket string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(stateDir, socket+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, nil //nolint:nilnil // another process has the lock
	}
	return nil, err
}

// logOnDemand sends the log to a file, because the process outlives the call that started it. It also changes
// the working directory to /, because that of the call may be on a filesystem that must be unmounted.
func logOnDemand(stateDir string) error {
	path := filepath.Join(stateDir, flexvolume.LogFile)
	mode := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if info, err := os.Stat(path); err == nil && info.Size() > onDemandLog {
		mode |= os.O_TRUNC
	}
	f, err := os.OpenFile(path, mode, 0o600)
	if err != nil {
		return err
	}
	os.Stderr = f
	return os.Chdir("/")
}
