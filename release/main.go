// The program release assembles images and other files of a release. Makefile, release.sh and publish.sh call it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/trivet-csi/trivet/release/image"
)

const usage = `usage:
  release image [flags] BINARY...    write an OCI archive with the image of each static binary
  release rootfs [flags] BINARY      write the content of the image to a directory
  release provenance [flags] FILE... print the provenance statement of the files
  release predicate STATEMENT        print the predicate of a statement
  release push ARCHIVE NAME:TAG      push the content of an OCI archive to a registry`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) == 0 {
		return errors.New(usage)
	}
	switch command := args[0]; command {
	case "image":
		return writeImage(ctx, args[1:])
	case "rootfs":
		return writeRootfs(ctx, args[1:])
	case "provenance":
		return writeProvenance(args[1:])
	case "predicate":
		return printPredicate(args[1:])
	case "push":
		return push(ctx, args[1:])
	default:
		return fmt.Errorf("unknown command %q\n%s", command, usage)
	}
}

// epochFlag is the time of all files in seconds since 1970 (SOURCE_DATE_EPOCH).
func epochFlag(flags *flag.FlagSet) *int64 {
	return flags.Int64("epoch", 0, "time of all files, in seconds since 1970")
}

func writeImage(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("image", flag.ExitOnError)
	var o image.Options
	out := flags.String("out", "", "file to write")
	flags.StringVar(&o.Name, "name", "", "reference of the image")
	flags.StringVar(&o.Version, "version", "", "version of the driver")
	flags.StringVar(&o.Revision, "revision", "", "commit of the driver")
	epoch := epochFlag(flags)
	_ = flags.Parse(args)
	o.Time = time.Unix(*epoch, 0)
	var err error
	if o.Binaries, err = readFiles(flags.Args()); err != nil {
		return err
	}
	if *out == "" || len(o.Binaries) == 0 {
		return errors.New(usage)
	}
	result, err := image.Write(ctx, *out, o)
	if err != nil {
		return err
	}
	fmt.Println(o.Name, result.Digest)
	for _, b := range result.Images {
		fmt.Printf("linux/%s %s: %.1f MB (%.1f MB compressed)\n", b.Arch, b.Digest, float64(b.Size)/1e6, float64(b.Compressed)/1e6)
	}
	return nil
}

func writeRootfs(ctx context.Context, args []string) error {
	flags := flag.NewFlagSet("rootfs", flag.ExitOnError)
	out := flags.String("out", "", "directory to create")
	epoch := epochFlag(flags)
	_ = flags.Parse(args)
	if *out == "" || flags.NArg() != 1 {
		return errors.New(usage)
	}
	binary, err := os.ReadFile(flags.Arg(0))
	if err != nil {
		return err
	}
	return image.WriteRootfs(ctx, *out, binary, time.Unix(*epoch, 0))
}

func readFiles(paths []string) ([][]byte, error) {
	var files [][]byte
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		files = append(files, data)
	}
	return files, nil
}
