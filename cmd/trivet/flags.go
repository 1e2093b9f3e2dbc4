package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/logging"
)

// The defaults of flags that several commands have. They fit the shipped systemd unit; in the
// driver's pod the environment overrides them.
const (
	defaultConfig   = "/etc/trivet/config.yaml"
	defaultStateDir = "/var/lib/trivet"
	defaultEndpoint = "unix:///run/trivet/csi.sock"
)

// driverNameVariable of the environment overrides the default of --driver-name.
const driverNameVariable = "CSI_DRIVER_NAME"

// patience limits each read of a pool, of the devices of this node, or of an NFS server.
const patience = 20 * time.Second

func configFlag(cmd *cobra.Command) *string {
	path := cmd.Flags().String("config", defaultConfig, "configuration `file`; if the default file is absent, one pool in STATE_DIR/pools/default is used")
	must(cmd.MarkFlagFilename("config", "yaml", "yml"))
	return path
}

func stateDirFlag(cmd *cobra.Command) *string {
	dir := new(string)
	directoryFlag(cmd, dir, "state-dir", defaultStateDir, "`directory` of this node's state")
	return dir
}

func endpointFlag(cmd *cobra.Command) *string {
	return cmd.Flags().String("endpoint", cmp.Or(os.Getenv("CSI_ENDPOINT"), defaultEndpoint), "`unix:///path` of the CSI socket; $CSI_ENDPOINT overrides the default")
}

func directoryFlag(cmd *cobra.Command, path *string, name, value, usage string) {
	cmd.Flags().StringVar(path, name, value, usage)
	must(cmd.MarkFlagDirname(name))
}

// logFlags adds the flags of the log to a command.
func logFlags(cmd *cobra.Command) *logging.Options {
	var o logging.Options
	cmd.Flags().IntVarP(&o.Level, "v", "v", 0, "verbosity `level` of the log: 2 logs each call in a line, 4 also requests and responses without secrets")
	choiceFlag(cmd, &o.Format, "log-format", "", "`format` of the log", logging.Formats...)
	return &o
}

// choiceFlag adds a flag that accepts only some texts. The first one is the default.
func choiceFlag(cmd *cobra.Command, target *string, name, shorthand, usage string, allowed ...string) {
	*target = allowed[0]
	cmd.Flags().VarP(&choice{target, allowed}, name, shorthand, usage+": "+oneOf(allowed))
	must(cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(allowed, cobra.ShellCompDirectiveNoFileComp)))
}

// choice is the value of a flag that accepts only some texts (pflag.Value).
type choice struct {
	target  *string
	allowed []string
}

// String returns the chosen text.
func (c *choice) String() string { return *c.target }

// Type returns the name of the type for the help.
func (c *choice) Type() string { return "string" }

// Set refuses a text that is not allowed.
func (c *choice) Set(text string) error {
	if !slices.Contains(c.allowed, text) {
		return fmt.Errorf("must be %s", oneOf(c.allowed))
	}
	*c.target = text
	return nil
}

// oneOf returns the texts as "a, b or c".
func oneOf(texts []string) string {
	last := len(texts) - 1
	return strings.Join(texts[:last], ", ") + " or " + texts[last]
}

// must panics if a flag that was just added does not exist.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// untilSignal returns a context that ends at the first signal. A second signal ends the process.
func untilSignal() (context.Context, func()) {
	ctx, restore := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	context.AfterFunc(ctx, restore)
	return ctx, restore
}

// loadConfig loads the configuration file of --config. Only the default file may be missing.
func loadConfig(path, stateDir string) (driver.Config, error) {
	return driver.LoadConfig(path, path == defaultConfig, stateDir, kinds)
}
