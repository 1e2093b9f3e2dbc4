package main

import (
	"context"
	"errors"
	"flag"
	"os"
	"path/filepath"

	"github.com/trivet-csi/trivet/doctor"
	"github.com/trivet-csi/trivet/driver"
)

// errUnwell ends the doctor with status 1; the table has said why.
var errUnwell = errors.New("something does not work: see the failures above")

func runDoctor(args []string) error {
	flags := flag.NewFlagSet("trivet doctor", flag.ContinueOnError)
	config, stateDir, endpoint := configFlag(flags), stateDirFlag(flags), endpointFlag(flags)
	name := flags.String("driver-name", os.Getenv(driverNameVariable), "`name` that the driver should have; the default is $"+driverNameVariable+", else the one that it says, or "+driver.DefaultName)
	format := outputFlag(flags, "table", "json")
	if err := parse(flags, args); err != nil {
		return err
	}
	checks := doctor.Run(context.Background(), doctor.Options{
		ConfigPath: *config, ConfigOptional: *config == defaultConfig,
		StateDir: filepath.Clean(*stateDir), Endpoint: *endpoint, DriverName: *name, Version: version, Patience: patience,
		Pod: doctor.Pod{
			InCluster: os.Getenv("KUBERNETES_SERVICE_HOST") != "",
			Node:      os.Getenv("NODE_NAME"), Namespace: os.Getenv("POD_NAMESPACE"),
			Name: os.Getenv("POD_NAME"), UID: os.Getenv("POD_UID"),
		},
	})
	rows := [][]string{{"CHECK", "RESULT", "SEEN"}}
	for _, c := range checks {
		rows = append(rows, []string{c.Name, string(c.Result), c.Seen})
		if c.Remedy != "" {
			rows = append(rows, []string{"", "", "→ " + c.Remedy})
		}
	}
	if err := write(os.Stdout, *format, checks, rows); err != nil {
		return err
	}
	if doctor.Failed(checks) {
		return errUnwell
	}
	return nil
}
