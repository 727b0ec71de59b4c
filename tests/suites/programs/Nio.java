import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.*;
import java.nio.file.attribute.BasicFileAttributes;
import java.util.*;
import java.util.stream.*;
import java.util.zip.CRC32;

/** Reads a tree by streams, channels, mappings and directory streams, and prints what it finds. */
public class Nio {
    static long sum(ByteBuffer bytes) {
        CRC32 crc = new CRC32();
        crc.update(bytes);
        return crc.getValue();
    }

    public static void main(String[] arguments) throws Exception {
        Path root = Paths.get(arguments[0]);
        List<Path> files;
        try (Stream<Path> walk = Files.walk(root)) {
            files = walk.filter(Files::isRegularFile).sorted().collect(Collectors.toList());
        }
        for (Path file : files) {
            BasicFileAttributes attributes = Files.readAttributes(file, BasicFileAttributes.class);
            byte[] all = Files.readAllBytes(file);
            ByteBuffer read = ByteBuffer.allocateDirect((int) attributes.size());
            try (FileChannel channel = FileChannel.open(file, StandardOpenOption.READ)) {
                while (read.hasRemaining() && channel.read(read, read.position()) > 0) { }
                read.flip();
                ByteBuffer mapped = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
                Path copy = Files.createTempFile("nio", "");
                try (FileChannel out = FileChannel.open(copy, StandardOpenOption.WRITE)) {
                    channel.transferTo(0, channel.size(), out);
                }
                long copied = sum(ByteBuffer.wrap(Files.readAllBytes(copy)));
                Files.delete(copy);
                System.out.printf("%s %d %s %08x %08x %08x %08x%n", root.relativize(file), attributes.size(), attributes.lastModifiedTime(),
                    sum(ByteBuffer.wrap(all)), sum(read), sum(mapped), copied);
            }
        }
        try (DirectoryStream<Path> entries = Files.newDirectoryStream(root)) {
            List<String> names = new ArrayList<>();
            entries.forEach(entry -> names.add(entry.getFileName().toString()));
            Collections.sort(names);
            System.out.println(names);
        }
        System.out.println(Files.exists(root.resolve("nothing")) + " " + Files.isReadable(files.get(0)));
    }
}
